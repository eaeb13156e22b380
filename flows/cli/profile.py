"""`blend profile`: measure what this machine can do."""

import os
from pathlib import Path
from typing import Annotated

import typer

from blend_core.errors import ConfigurationError
from flows.cli.output import Json, print_json, print_line, print_table, tell


def register(app: typer.Typer) -> None:
    """Adds the command."""
    app.command()(profile)


def profile(
    save: Annotated[
        Path | None,
        typer.Option(
            "--save", metavar="FILE", help="Write the profile as TOML, for BLEND_ENGINE__DEVICE_PROFILE."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure this CPU for plans and densities.

    Takes a few seconds; other work on the machine spoils it.

    \b
    Example:
      blend profile --save this-cpu.toml && export BLEND_ENGINE__DEVICE_PROFILE=this-cpu.toml
    """
    from dataclasses import asdict

    from blend_core.device_measure import measure_cpu_profile
    from blend_core.specs import save_device_profile

    if save is not None:
        _check_file(save)
    tell("Measuring this CPU…")
    measured = measure_cpu_profile(save.stem if save is not None else "this-cpu")
    if save is not None:
        save_device_profile(measured, save)
    if json:
        print_json(asdict(measured))
        return
    print_table(
        ("device profile", measured.name),
        [
            ("compute, GFLOP/s", measured.compute_flops_per_s / 1e9),
            ("memory bandwidth, GB/s", measured.bandwidth_bytes_per_s / 1e9),
            ("KV capacity, GiB", measured.kv_capacity_bytes / 2**30),
            ("GEMM efficiency", measured.gemm_efficiency),
            ("GEMM fixed cost per layer, us", measured.gemm_fixed_s_per_layer * 1e6),
            ("attention bandwidth efficiency", measured.attention_bandwidth_efficiency),
        ],
    )
    if save is not None:
        print_line(f"Saved as {save}; use it with BLEND_ENGINE__DEVICE_PROFILE={save}")


def _check_file(path: Path) -> None:
    """Refuses what could not be written or read back before anything is measured."""
    from blend_core.specs import is_profile_name

    if path.suffix != ".toml" or not is_profile_name(path.stem):
        raise ConfigurationError(
            f"--save {str(path)!r} cannot name a profile; name a file FILE.toml of a short, printable name."
        )
    folder = path.parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK) or path.is_dir():
        raise ConfigurationError(
            f"--save {path} cannot be written; name a file in a folder that is there and yours to write in."
        )
