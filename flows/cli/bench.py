"""`blend bench`: measure parts of the platform on this machine."""

from typing import Annotated, Literal

import typer

from blend_core.errors import ConfigurationError
from blend_core.wording import count_text
from flows.cli import bench_studies
from flows.cli.output import Json, print_json, print_line, print_table, tell
from flows.numbers import MAX_SEED

DEFAULT_ROUNDS = 7
"""Of `--versus`."""

MAX_NUM_PLANNED = 10_000_000
"""More would take more memory than machines have."""

group = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


def register(app: typer.Typer) -> None:
    """Adds the group."""
    bench_studies.register(group)
    app.add_typer(group, name="bench", help="Measure the platform on this machine.")


@group.command()
def engine(
    model: Annotated[
        str | None,
        typer.Option(
            help="Model by name or folder. Default: smollm2-135m; for vllm a random Llama made on the spot."
        ),
    ] = None,
    num_requests: Annotated[
        int | None,
        typer.Option("--requests", min=8, help="Requests of the mixed file. Default: 128; for vllm 424."),
    ] = None,
    name: Annotated[
        Literal["torch", "vllm"], typer.Option("--engine", help="The engine that is measured.")
    ] = "torch",
    versus: Annotated[
        Literal["run-batch"] | None,
        typer.Option(
            help="With --engine vllm: what it is measured beside, vLLM's own batch runner. Default, and the "
            "only choice: run-batch."
        ),
    ] = None,
    num_rounds: Annotated[
        int | None,
        typer.Option(
            "--rounds",
            min=1,
            help="With --engine vllm: every way runs once in each, some 8 minutes a round. "
            f"Default: {DEFAULT_ROUNDS}.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Measure an engine under each policy.

    Runs one mixed file under fcfs, dfs, dual_scan and density_matched with scarce KV.

    The file has long shared prefixes with short answers and short prompts with long answers, shuffled. Engine
    settings are the same for every policy. Needs no services.

    With --engine vllm the same file goes through `vllm run-batch`, too, with scarce KV and with ample, in
    rounds that take turns, each run in a process of its own: ten of them a round. All rounds of the
    default took 58 minutes on two cores; --rounds 1 tells the order of the ways, and no ranges.

    \b
    Example:
      blend bench engine --json
      blend bench engine --engine vllm --versus run-batch
    """
    if name == "vllm":
        _versus(model, num_requests, num_rounds or DEFAULT_ROUNDS, json=json)
        return
    for option, value in (("--versus", versus), ("--rounds", num_rounds)):
        if value is not None:
            raise ConfigurationError(f"{option} is for --engine vllm; give that, too, or leave {option} out.")
    model, num_requests = model or "smollm2-135m", num_requests or 128
    from dataclasses import asdict

    from flows.bench.engine import run_engine_bench
    from flows.settings import load_settings

    figures = run_engine_bench(load_settings(), model, num_requests, tell)
    if json:
        print_json(asdict(figures))
        return
    base = figures.policies[0].total_tokens_per_s
    print_line(f"engine {figures.engine}, model {figures.model}")
    print_table(
        ("policy", "output tokens/s", "total tokens/s", "to fcfs", "prefix sharing", "preempted"),
        [
            (
                run.policy,
                f"{run.output_tokens_per_s:,.1f}",
                f"{run.total_tokens_per_s:,.1f}",
                f"{run.total_tokens_per_s / base:.2f}x",
                f"{run.prefix_sharing:.1%}",
                run.num_preempted,
            )
            for run in figures.policies
        ],
    )


def _versus(model: str | None, num_requests: int | None, num_rounds: int, *, json: bool) -> None:
    from dataclasses import asdict

    from flows.bench.versus import RANDOM_MODEL, run_versus_bench
    from flows.settings import load_settings

    figures = run_versus_bench(load_settings(), model or RANDOM_MODEL, num_requests or 424, num_rounds, tell)
    if json:
        print_json(asdict(figures))
        return
    print_line(
        f"engine {figures.engine} beside vLLM's own run-batch, model {figures.model}, medians of "
        f"{count_text(num_rounds, 'round')}"
    )
    print_table(
        (
            "KV",
            "blocks",
            "run",
            "output tokens/s",
            "to run-batch",
            "process, s",
            "prefix sharing",
            "preempted",
            "added",
            "beside",
        ),
        [
            (
                setting.kv,
                setting.kv_blocks,
                run.name,
                "{:,.0f} ({:,.0f} to {:,.0f})".format(
                    run.output_tokens_per_s, *run.output_tokens_per_s_range
                ),
                "{:.2f}x ({:.2f} to {:.2f})".format(run.ratio_to_run_batch, *run.ratio_range),
                f"{run.process_s:.1f}",
                f"{run.prefix_sharing:.1%}",
                run.num_preempted,
                f"{run.added_s_per_step * 1e3:.3f} ms",
                f"{run.beside_s_per_step * 1e3:.3f} ms",
            )
            for setting in figures.settings
            for run in setting.runs
        ],
    )


@group.command()
def ingest(
    num_requests: Annotated[
        int, typer.Option("--requests", min=1000, help="Request lines to read.")
    ] = 1_000_000,
    json: Json = False,
) -> None:
    """Measure how fast request files are read.

    Lines of 1.3 KB are read from the S3 server, parsed and validated; some are tokenised beside it.

    \b
    Example:
      blend bench ingest --requests 200000 --json
    """
    from dataclasses import asdict

    from flows.bench.ingest import run_ingest_bench
    from flows.cli.services import brought_up

    with brought_up() as wiring:
        figures = run_ingest_bench(wiring, num_requests, tell)
    if json:
        print_json(asdict(figures))
        return
    print_table(
        ("requests", "MB", "requests/s", "MB/s", "tokens/s", "peak memory, MB"),
        [
            (
                figures.num_requests,
                figures.bytes / 1e6,
                figures.requests_per_s,
                figures.bytes_per_s / 1e6,
                figures.tokens_per_s,
                figures.peak_rss_bytes / 1e6,
            )
        ],
    )


@group.command()
def record(
    num_rows: Annotated[int, typer.Option("--rows", min=1000, help="Results to record.")] = 200_000,
    json: Json = False,
) -> None:
    """Measure how fast results are recorded.

    Results of a throw-away job go to Postgres through the same recorder as those of a run.

    \b
    Example:
      blend bench record --json
    """
    from flows.bench.record import run_record_bench
    from flows.cli.services import brought_up

    with brought_up() as wiring:
        rows_per_s = run_record_bench(wiring.database, wiring.objects, num_rows)
    if json:
        print_json({"rows_per_s": rows_per_s})
    else:
        print_line(f"{rows_per_s:,.0f} results/s")


@group.command()
def plan(
    num_requests: Annotated[
        int, typer.Option("--requests", min=100, max=MAX_NUM_PLANNED, help="Requests to plan.")
    ] = 400_000,
    seed: Annotated[int, typer.Option(min=0, max=MAX_SEED, help="Of the made-up requests.")] = 0,
    json: Json = False,
) -> None:
    """Measure how fast a job is planned, and in how much memory.

    Requests of about 600 prompt tokens are made up, then read, and planned in a fresh process. The total is
    without reading them. Needs no services.

    \b
    Example:
      blend bench plan --requests 100000 --json
    """
    from dataclasses import asdict

    from flows.bench.plan import run_plan_bench

    figures = run_plan_bench(num_requests, seed, tell)
    if json:
        print_json(asdict(figures))
        return
    print_table(
        (
            "requests",
            "prompt tokens",
            "load, s",
            "build, s",
            "transform, s",
            "total, s",
            "peak memory, MB",
            "prefix sharing",
            "of the best",
        ),
        [
            (
                figures.num_requests,
                figures.num_prompt_tokens,
                f"{figures.load_s:.2f}",
                f"{figures.build_s:.2f}",
                f"{figures.transform_s:.2f}",
                f"{figures.total_s:.2f}",
                figures.peak_rss_bytes / 1e6,
                f"{figures.prefix_sharing:.1%}",
                f"{figures.sharing_kept:.1%}",
            )
        ],
    )
