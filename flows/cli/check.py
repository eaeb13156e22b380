"""`blend validate` and `blend plan`: look at requests before anything runs."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli.output import Json, print_json, print_line, print_table

if TYPE_CHECKING:
    from blend_core.policies.base import EngineLimits
    from blend_core.specs import DeviceProfile, ModelSpec
    from blend_core.tokenizing import Tokenizer
    from flows.settings import Settings

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE", help="OpenAI Batch JSONL, plain or gzip: a local file or s3://bucket/key."
    ),
]
DefaultMaxTokens = Annotated[
    int,
    typer.Option("--max-tokens", min=1, help="Longest answer of a request that does not say `max_tokens`."),
]

LARGE_NUM_SEQS = 1024
"""Requests in flight at most on a device that is not the engine's own."""


def register(app: typer.Typer) -> None:
    """Adds the commands."""
    app.command()(validate)
    app.command()(plan)


def validate(
    source: Source,
    model: Annotated[
        str | None, typer.Option(help="Refuse requests that ask for another model, as `strict_model` does.")
    ] = None,
    json: Json = False,
) -> None:
    """Check a request file line by line.

    Prints each bad line with its number, code and reason. Needs neither services nor a model. Blank lines do
    not count. Prompts too long for a model are found when the job runs.

    \b
    Examples:
      blend validate requests.jsonl
      blend validate requests.jsonl.gz --json
    """
    from flows.cli.source_lines import MAX_LINE_BYTES, source_lines
    from flows.dry_run import check_lines
    from flows.ingest.parse import ParseOptions

    options = ParseOptions(model or "", strict_model=model is not None, max_line_bytes=MAX_LINE_BYTES)
    errors: list[dict[str, Any]] = []
    total = 0
    for line in check_lines(source_lines(source), options):
        total += 1
        if line.code is not None:
            errors.append(
                {
                    "line": line.number,
                    "custom_id": line.custom_id,
                    "code": line.code.value,
                    "reason": line.reason,
                }
            )

    codes = Counter(error["code"] for error in errors)
    if json:
        print_json(
            {
                "source": source,
                "total": total,
                "valid": total - len(errors),
                "invalid": len(errors),
                "error_codes": dict(codes.most_common()),
                "errors": errors,
            }
        )
        return
    for error in errors:
        name = f" ({error['custom_id']})" if error["custom_id"] is not None else ""
        print_line(f"line {error['line']}{name}: {error['code']}: {error['reason']}")
    print_line(f"{total:,} requests: {total - len(errors):,} valid, {len(errors):,} invalid")


def plan(
    source: Source,
    model: Annotated[
        str, typer.Option(help="Model of the store, a Hugging Face folder, or a preset such as llama-3.1-8b.")
    ] = "smollm2-135m",
    device: Annotated[
        str | None, typer.Option(help="Device profile by name or TOML file; by default the engine's own.")
    ] = None,
    max_tokens: DefaultMaxTokens = 256,
    json: Json = False,
) -> None:
    """Tell what a plan would promise; runs nothing.

    Prefix sharing, compute density and the simulated duration under each policy. Needs no services. A preset
    has no tokenizer: then four bytes of text count as a token.

    \b
    Examples:
      blend plan requests.jsonl
      blend plan requests.jsonl --model llama-3.1-8b --device a100-80g --json
    """
    from dataclasses import asdict

    from blend_core.specs import load_device_profile
    from flows.cli.source_lines import MAX_LINE_BYTES, source_lines
    from flows.dry_run import check_lines, forecast, read_requests
    from flows.ingest.parse import ParseOptions
    from flows.settings import load_settings

    settings = load_settings()
    profile = load_device_profile(device or settings.engine.device_profile)
    spec, tokenizer = _model(settings, model)
    options = ParseOptions(model, default_max_tokens=max_tokens, max_line_bytes=MAX_LINE_BYTES)
    requests = read_requests(check_lines(source_lines(source), options), tokenizer, spec.max_model_len)
    limits = _limits(settings, spec, profile, is_own_device=device is None)
    told = forecast(requests.arrays, spec, profile, limits)
    if json:
        print_json(
            {
                "source": source,
                "invalid": requests.num_bad,
                "counted_with_tokenizer": tokenizer is not None,
                "summary": asdict(told.summary),
                "policies": [asdict(entry) for entry in told.policies],
            }
        )
        return
    summary = told.summary
    counted = "" if tokenizer is not None else " (four bytes of text taken for a token)"
    print_line(
        f"{summary.num_requests:,} requests, {requests.num_bad:,} bad lines; "
        f"{summary.num_prompt_tokens:,} prompt tokens{counted}, "
        f"{summary.estimated_output_tokens:,.0f} output tokens estimated"
    )
    print_line(
        f"{summary.model} on {summary.device}: density {summary.density:.2f}, prefix sharing at best "
        f"{summary.prefix_sharing_best:.1%}, at least {summary.optimum_s:,.1f} s with perfect overlap"
    )
    print_line("")
    print_table(
        ("policy", "sharing in order", "simulated s", "simulated sharing", "preempted"),
        [
            (
                entry.policy,
                f"{entry.prefix_sharing:.1%}",
                None if entry.estimated_duration_s is None else f"{entry.estimated_duration_s:,.1f}",
                None if entry.simulated_sharing is None else f"{entry.simulated_sharing:.1%}",
                entry.num_preempted,
            )
            for entry in told.policies
        ],
    )


def _model(settings: "Settings", model: str) -> "tuple[ModelSpec, Tokenizer | None]":
    """Sizes of the model, and its tokenizer where its files are here."""
    from blend_core.model_store import ModelStore
    from blend_core.specs import load_model_spec, model_spec_preset, model_spec_preset_names
    from blend_core.tokenizing import Tokenizer

    store = ModelStore(settings.home / "models")
    known = {entry.name for entry in store.list()}
    if model not in known and not Path(model).is_dir() and model in model_spec_preset_names():
        return model_spec_preset(model), None
    folder = store.resolve(model)
    return load_model_spec(folder, "bfloat16", model), Tokenizer(folder)


def _limits(
    settings: "Settings", model: "ModelSpec", device: "DeviceProfile", *, is_own_device: bool
) -> "EngineLimits":
    """The engine's own limits; on another device what a large one is given."""
    from blend_core.performance import MAX_NUM_BATCHED_TOKENS
    from blend_core.policies.base import EngineLimits

    engine = settings.engine
    kv_bytes = engine.kv_gib * 2**30 if is_own_device else device.kv_capacity_bytes
    return EngineLimits(
        block_size=engine.block_size,
        num_blocks=int(kv_bytes) // (engine.block_size * model.kv_bytes_per_token),
        max_num_seqs=engine.max_num_seqs if is_own_device else LARGE_NUM_SEQS,
        max_num_batched_tokens=engine.max_num_batched_tokens if is_own_device else MAX_NUM_BATCHED_TOKENS,
    )
