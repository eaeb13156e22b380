"""Settings and traces of the studies' tests."""

import os
from pathlib import Path

import pytest

from blend_core.specs import load_device_profile, model_spec_preset
from blend_core.studies.mixes import Setting


@pytest.fixture(scope="session")
def traces() -> Path:
    """The folder of published traces; tests that need it are skipped where there is none."""
    folder = Path(os.environ.get("BLEND_TRACES", Path(__file__).parents[4] / "shared" / "traces"))
    if not (folder / "azure_llm_2023.parquet").is_file():
        pytest.skip("needs the published traces; name their folder in BLEND_TRACES")
    return folder


@pytest.fixture(scope="session")
def setting() -> Setting:
    """One simulated hour of the studies' model and device."""
    return Setting(
        model_spec_preset("llama-3.1-8b"), load_device_profile("a100-80g"), block_size=16, hours=1.0
    )
