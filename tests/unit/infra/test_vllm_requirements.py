"""What is installed beside vLLM: the extra `vllm`, a copy for pip, and what make sifts from the metadata.

The fixture is every `Requires-Dist` of vllm-0.32.0-cp38-abi3-manylinux_2_28_x86_64.whl, the one for CUDA.
"""

import tomllib
from pathlib import Path

from packaging.requirements import Requirement

from infra.deploy.vllm_requirements import sifted

REQUIRED = (Path(__file__).parent / "vllm_0_32_0_requirements.txt").read_text().splitlines()
PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"

NOT_FOR_CUDA = 'protobuf==7.36.1; platform_machine == "s390x"'
"""A machine without CUDA: the one requirement that make sifts and the extra leaves out."""


def read(requirements: list[str]) -> list[tuple[str, list[str], str, str]]:
    parsed = [Requirement(line) for line in requirements]
    return sorted((one.name, sorted(one.extras), str(one.specifier), str(one.marker)) for one in parsed)


def test_the_extra_is_what_vllm_for_cuda_needs_sifted() -> None:
    extra = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]["vllm"]
    assert read([*extra, NOT_FOR_CUDA]) == read(sifted(REQUIRED, with_media=True))


def test_bounds_on_fastapi_and_setuptools_are_all_that_is_sifted_out_for_cuda() -> None:
    needed = [line for line in REQUIRED if "extra ==" not in line]
    kept = sifted(REQUIRED, with_media=True)
    assert [line for line in needed if line not in kept] == [
        "fastapi[standard]<0.137.0,>=0.133.0",
        'setuptools<81.0.0,>=78.1.1; python_version > "3.11"',
    ]
    assert [line for line in kept if line not in needed] == ["fastapi[standard]"]
