"""Makes the suite's own modules importable: the step-by-step engine, the checked policy and the cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
