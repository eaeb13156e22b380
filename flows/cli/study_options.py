"""Options that studies share, and what they ask to simulate."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blend_core.errors import ConfigurationError
from flows.cli.output import tell
from flows.numbers import MAX_SEED, MAX_TENSOR_PARALLEL

if TYPE_CHECKING:
    from flows.bench.study_tasks import StudyTarget

Traces = Annotated[
    Path | None,
    typer.Option(help="Folder of published traces; BLEND_TRACES by default. Without it lengths are made up."),
]
Seed = Annotated[int, typer.Option(min=0, max=MAX_SEED, help="First seed.")]
Seeds = Annotated[int | None, typer.Option(min=1, max=1_000, help="Number of seeds to take the mean of.")]
Hours = Annotated[
    float | None,
    typer.Option(min=0.01, max=1_000, help="Practical optimum of each workload."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Preset, Hugging Face folder or model of the store; llama-3.1-8b by default.",
    ),
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Device profile by name or TOML file; a100-80g by default."),
]
TensorParallel = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_TENSOR_PARALLEL,
        metavar="N",
        help="Devices of a replica; by default as many as hold the weights. Communication is not counted.",
    ),
]
Quick = Annotated[
    bool,
    typer.Option(
        "--quick", help="Small workloads and one seed, in a minute or two: policies differ less than in full."
    ),
]
Plots = Annotated[Path | None, typer.Option(metavar="DIR", help="Draw PNG and SVG plots into this folder.")]
WriteDocs = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write the tables into this Markdown file.")
]


@dataclass(frozen=True, slots=True)
class AskedTarget:
    """What options ask to simulate.

    Attributes:
        target: model and devices.
        tensor_parallel: devices of a replica.
        options: the options that were given, as one writes them behind a command.
    """

    target: "StudyTarget"
    tensor_parallel: int
    options: str

    @property
    def text(self) -> str:
        """Model and device in a few words."""
        return f"{self.target.model.name} on {self.target.device.name}"

    def as_json(self) -> dict[str, Any]:
        """What the figures of a study hold for."""
        return {
            "model": self.target.model.name,
            "device": self.target.device.name,
            "tensor_parallel": self.tensor_parallel,
        }


def asked_target(model: str | None, device: str | None, tensor_parallel: int | None) -> AskedTarget:
    """Returns what to simulate, found as `blend plan` finds it; None leaves it at what the studies are of.

    Raises:
        ConfigurationError: there is no such model or device, or the devices do not hold the model.
    """
    from blend_core.specs import load_device_profile
    from blend_core.studies.study import BLOCK_SIZE
    from flows.bench.study_tasks import StudyTarget, study_target
    from flows.dry_run.model import find_model
    from flows.dry_run.target import target_of
    from flows.settings import load_settings

    published = study_target()
    spec, profile = published.model, published.device
    if model is not None:
        spec = find_model(load_settings(), model)
    if device is not None:
        profile = load_device_profile(device)
    found = target_of(spec, profile, BLOCK_SIZE, tensor_parallel)
    given = {"--model": model, "--device": device, "--tensor-parallel": tensor_parallel}
    return AskedTarget(
        StudyTarget(found.model, found.device),
        found.tensor_parallel,
        "".join(f" {name} {shlex.quote(str(value))}" for name, value in given.items() if value is not None),
    )


def folder_of_traces(folder: Path | None) -> Path | None:
    """Returns the folder of published traces; None, and a word about it, where there is none.

    Raises:
        ConfigurationError: the folder that was named is not there.
    """
    from flows.settings import load_settings

    chosen = load_settings().traces if folder is None else folder
    if chosen.is_dir():
        return chosen
    if folder is not None:
        raise ConfigurationError(f"There is no folder {folder}; name the one of the traces by --traces.")
    tell(f"there is no folder {chosen} of traces: lengths are generated from published moments")
    return None
