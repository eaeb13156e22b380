"""What can be known to be wrong before anything runs: the engine's settings, the model, a job's queries, the
table that takes its results."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from blend_core.errors import ConfigurationError, StorageUnavailableError
from blend_core.model_store import check_weights
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import open_queries, open_tables
from flows.job_parts import EngineName
from flows.job_spec import BatchJobSpec
from flows.serving import Serving
from flows.settings import Settings, settings_file
from flows.wiring import Wiring
from flows.write_back import check_write_back

_WIDENING: Final = ("hf_overrides", "max_lora_rank")
"""Options of vLLM's by which it takes what it would refuse without them."""


def check_job(wiring: Wiring, spec: BatchJobSpec) -> None:
    """Checks that this process could run the job, as far as that can be told without reading its sources.

    Raises:
        ConfigurationError: device, device profile, model, a connection, a query, a template, what a source
            asks of the engine, or the table to write back to is wrong.
        StorageUnavailableError: the server of that table did not answer.
    """
    check_queries(spec, wiring.source_urls(), wiring.parse_options(spec))
    check_write_back(wiring, spec)
    check_engine(wiring, spec)


def check_queries(
    spec: BatchJobSpec, source_urls: Mapping[str, str], options: ParseOptions | None = None
) -> None:
    """Checks connections, templates and the kind of statement of a job's queries and tables.

    Args:
        spec: the job.
        source_urls: Postgres URLs by the names that SQL sources use.
        options: of parsing where the job runs; None where that is not known, so that what its engine keeps of
            JSON schemas and adapters is not checked.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    options = options or ParseOptions(spec.model)
    open_queries(spec, source_urls, options)
    open_tables(spec, options)


def check_connections(spec: BatchJobSpec, settings: Settings) -> None:
    """Checks that every connection that a job names has a URL in these settings.

    Raises:
        ConfigurationError: one has none; names the variable.
    """
    sources, targets = (
        {name.lower() for name in names} | {name.upper() for name in names}
        for names in (settings.sources, settings.targets)
    )
    missing = [
        (source.connection, "SOURCES", "read")
        for source in spec.sql
        if source.connection not in sources | {"platform"}
    ]
    if spec.write_back is not None and spec.write_back.connection not in targets:
        missing.append((spec.write_back.connection, "TARGETS", "write back"))
    if missing:
        connection, group, use = missing[0]
        raise ConfigurationError(
            f"The job {spec.name!r} is to {use} by the connection {connection!r}, which has no URL; set "
            f"BLEND_{group}__{connection.upper()}, in the environment or in {settings_file(settings.home)}."
        )


def check_table_to_write(wiring: Wiring, spec: BatchJobSpec, note: Callable[[str], None]) -> None:
    """Checks the table that takes a job's results before the night starts.

    A server that does not answer holds up nothing: it may by morning.

    Raises:
        ConfigurationError: the table, a column or a right is missing.
    """
    try:
        check_write_back(wiring, spec)
    except StorageUnavailableError as error:
        note(f"The table to write back to cannot be checked now: {error}")


def check_engine(wiring: Wiring, spec: BatchJobSpec) -> None:
    """Checks what the engine of a job would be opened with.

    Raises:
        ConfigurationError: the engine that is asked for cannot serve here, the device is not there, there are
            fewer than ranks, its profile is unknown, a LoRA adapter cannot be used, vLLM's options do not
            fit the model, the model cannot be served or is not whole, or KV has room for nothing.
    """
    folder = wiring.models.resolve(spec.model)
    check_weights(folder)
    wiring.device_profile()
    serving = wiring.serving(spec)
    if not serving.is_vllm:
        _check_device(wiring.settings.engine.device)
    is_any_length_taken = wiring.settings.is_any_context_length_taken
    serving.check_options(folder, spec.model, is_any_length_taken=is_any_length_taken)
    wiring.rank_devices(spec)
    wiring.engine_limits(spec, wiring.model_spec(spec))


def check_submitted(wiring: Wiring, spec: BatchJobSpec) -> None:
    """Checks what of a job is wrong whichever process of this machine runs it: model, and options for vLLM.

    That process may have another environment: a vLLM, other settings, another folder that it was started in.
    Of this one's options for vLLM only those count that let it take more of what the job brings.

    Raises:
        ConfigurationError: the model is not known or not whole, the job has options for vLLM and asks for
            torch, a LoRA adapter cannot be used, or an option does not fit the model.
    """
    folder = wiring.models.resolve(spec.model)
    check_weights(folder)
    if not spec.options.vllm:
        return
    settings = wiring.settings
    widening = {name: value for name, value in settings.engine.vllm.items() if name in _WIDENING}
    machine = settings.engine.model_copy(update={"name": EngineName.AUTO.value, "vllm": widening})
    serving = Serving.to_plan(machine, spec.options, is_device_here=False)
    whole = {name: path for name, path in serving.lora_adapters.items() if _is_whole(path)}
    serving = replace(serving, vllm_options={**serving.vllm_options, "lora_adapters": whole})
    is_any_length_taken = settings.is_any_context_length_taken
    serving.check_options(folder, spec.model, is_any_length_taken=is_any_length_taken)


def _is_whole(path: str) -> bool:
    return path.startswith("~") or Path(path).is_absolute()


def _check_device(name: str) -> None:
    if name == "cpu":
        return
    # Only here, since torch takes seconds to load.
    import torch

    try:
        device = torch.device(name)
        # Nothing is allocated on a GPU: this process would hold a part of its memory for good.
        if device.type != "cuda":
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        # What torch raises for a name, a build or a backend that lacks the device.
        raise ConfigurationError(
            f"BLEND_ENGINE__DEVICE {name!r} is no device of this machine; give cpu, cuda or cuda:1."
        ) from None
    num_gpus = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigurationError(
            f"BLEND_ENGINE__DEVICE is {name!r}, and torch finds {num_gpus} CUDA devices here; set it to cpu, "
            "or install a torch build and a driver that see the GPU."
        )
