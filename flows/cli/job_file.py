"""The sources of a job file, opened for a dry run: as the job would read and check them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from blend_core.specs import ModelSpec
from blend_core.tokenizing import Tokenizer
from flows.cli.services import connected
from flows.dry_run.job_source import job_file_lines
from flows.dry_run.lines import CheckedLine
from flows.dry_run.model import find_model, load_tokenizer, model_folder
from flows.ingest.parse import ParseOptions
from flows.job_spec import BatchJobSpec, load_job_file
from flows.serving import Serving
from flows.settings import Settings
from flows.wiring import Wiring


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """What options say about reading; None leaves it to the job, or to the default.

    Attributes:
        model: name of the model, a folder or a preset.
        default_max_tokens: longest answer of a request that does not say.
        is_device_here: for this machine's device.
        quick: do not tokenise.
    """

    model: str | None
    default_max_tokens: int | None = None
    is_device_here: bool = True
    quick: bool = False


@dataclass(frozen=True, slots=True)
class OpenedJobFile:
    """A job file with its lines, while the services are connected.

    Attributes:
        spec: the job.
        serving: the engine that would run it.
        model: sizes of the model, with the context that it would be served with.
        tokenizer: the model's own; None where its files are not here, or it is not asked for.
        lines: every line and row of its sources.
        wiring: the parts of this process.
    """

    spec: BatchJobSpec
    serving: Serving
    model: ModelSpec
    tokenizer: Tokenizer | None
    lines: Iterator[CheckedLine]
    wiring: Wiring


@contextmanager
def opened_job_file(
    settings: Settings, source: str, options: ReadOptions, tell: Callable[[str], None]
) -> Iterator[OpenedJobFile]:
    """Opens the sources of a job file; `tell` hears of what takes seconds.

    Raises:
        ConfigurationError: the file or the model is not there or wrong, or this machine's vLLM would not
            serve it so.
        ServiceError: the services do not run.
    """
    spec = load_job_file(Path(source))
    name = options.model or spec.model
    serving = Serving.to_plan(settings.engine, spec.options, is_device_here=options.is_device_here)
    model = served_model(settings, serving, name, options)
    is_here = options.is_device_here
    parsing = ParseOptions(
        spec.model,
        strict_model=spec.options.strict_model,
        default_max_tokens=options.default_max_tokens or spec.options.default_max_tokens,
        chat_template_kwargs=spec.options.chat_template_kwargs,
        # The engine of another machine may be another one.
        keeps_schemas=serving.is_vllm or not is_here,
        lora_adapters=frozenset(serving.lora_adapters) if is_here else None,
    )
    with connected(settings) as wiring:
        # Only now: it takes seconds, in vain where the services do not run.
        tokenizer = None if options.quick else load_tokenizer(settings, name, tell)
        yield OpenedJobFile(spec, serving, model, tokenizer, job_file_lines(wiring, spec, parsing), wiring)


def served_model(settings: Settings, serving: Serving, name: str, options: ReadOptions) -> ModelSpec:
    """The model with the context that it would be served with.

    Raises:
        ConfigurationError: there is no such model, or this machine's vLLM would not serve it so.
    """
    folder = model_folder(settings, name)
    if options.is_device_here and folder is not None:
        is_any_length_taken = settings.is_any_context_length_taken
        serving.check_options(folder, name, is_any_length_taken=is_any_length_taken)
    model = find_model(settings, name)
    if serving.is_vllm and folder is not None:
        # In the element type of the job's own options, which says how many tokens KV holds.
        model = serving.model_spec(folder, model.name)
    return replace(model, max_model_len=serving.max_model_len(model))
