"""One run of the comparison, in a process of its own: `python -m flows.bench.versus_process RUN.json`.

It reads what to run from the file, writes figures into another, and is timed from outside. The end of its
standard input is that of its parent, and then its own and that of all it started.
"""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from blend_core.engines.process_child import end_with_parent

if TYPE_CHECKING:
    from blend_core.engines.vllm.options import VllmEngineOptions

RUN_BATCH: Final = "run-batch"
"""Name of vLLM's own batch runner among the ways to run the file."""


@dataclass(frozen=True, slots=True)
class VersusRun:
    """What a process is to run.

    Attributes:
        name: `run-batch`, or a policy of ours.
        model_folder: the model.
        request_file: lines to answer.
        output_file: where answers go.
        figures_file: where figures go.
        device: `cpu` or `cuda`.
        device_profile: by name or path.
        dtype: of weights and KV.
        block_size: tokens of a KV block.
        kv_blocks: KV blocks.
        max_num_seqs: requests in flight at most.
        max_num_batched_tokens: tokens of a step at most.
        max_model_len: longest prompt plus answer.
        num_threads: CPU threads; 0 leaves vLLM's own choice.
    """

    name: str
    model_folder: str
    request_file: str
    output_file: str
    figures_file: str
    device: str
    device_profile: str
    dtype: str
    block_size: int
    kv_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_threads: int

    def save(self, path: Path) -> None:
        """Writes it down for a process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: Path) -> "VersusRun":
        """What `save` wrote."""
        return cls(**json.loads(path.read_text()))


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What a process measured.

    Attributes:
        num_prompt_tokens: tokens of all prompts.
        num_output_tokens: tokens of all answers.
        busy_s: from opening the request file to the last answer; loading the model and writing answers down
            are not in it.
        prefix_sharing: share of prompt tokens that came from the cache.
        num_preempted: preemptions.
        added_s_per_step: what a step waits for our part of the scheduler, in the mean.
        beside_s_per_step: what that part does while the step is computed.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    busy_s: float
    prefix_sharing: float
    num_preempted: int
    added_s_per_step: float
    beside_s_per_step: float


def main(path: Path) -> None:
    """Runs what the file says and writes the figures."""
    run = VersusRun.load(path)
    figures = _run_batch(run) if run.name == RUN_BATCH else _run_policy(run)
    Path(run.figures_file).write_text(json.dumps(asdict(figures)))


def _options(run: VersusRun) -> "VllmEngineOptions":
    from blend_core.engines.vllm.options import VllmEngineOptions
    from blend_core.specs import load_device_profile

    policy = "fcfs" if run.name == RUN_BATCH else run.name
    return VllmEngineOptions(
        model_folder=run.model_folder,
        policy=policy,
        device_profile=load_device_profile(run.device_profile),
        device=run.device,
        dtype=run.dtype,
        block_size=run.block_size,
        max_num_seqs=run.max_num_seqs,
        max_num_batched_tokens=run.max_num_batched_tokens,
        num_threads=run.num_threads or None,
        passed={"num_gpu_blocks_override": run.kv_blocks, "max_model_len": run.max_model_len},
    )


def _run_batch(run: VersusRun) -> RunFigures:
    """vLLM's own batch runner, as `vllm run-batch` starts it, with the same settings."""
    from blend_core.engines.vllm.engine import set_environment

    options = _options(run)
    set_environment(options)
    from prometheus_client import REGISTRY
    from vllm.entrypoints.launchers import run_batch
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client
    from vllm.usage.usage_lib import UsageContext

    arguments = [
        *("-i", run.request_file, "-o", run.output_file, "--model", run.model_folder),
        *("--dtype", run.dtype, "--block-size", str(run.block_size), "--seed", "0"),
        *("--num-gpu-blocks-override", str(run.kv_blocks), "--max-model-len", str(run.max_model_len)),
        *("--max-num-seqs", str(run.max_num_seqs)),
        *("--max-num-batched-tokens", str(run.max_num_batched_tokens)),
        *(("--enforce-eager",) if options.is_on_cpu else ()),
    ]
    sys.argv[1:] = arguments
    asked = run_batch.parse_args()
    clock = time_file(run_batch, time.perf_counter)

    async def answer() -> None:
        async with build_async_engine_client(
            asked, usage_context=UsageContext.OPENAI_BATCH_RUNNER
        ) as engine_client:
            await run_batch.run_batch(engine_client, asked)

    asyncio.run(answer())
    counted = {
        sample.name: sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name.startswith("vllm:")
    }
    answers = [json.loads(line) for line in Path(run.output_file).read_text().splitlines()]
    usages = [one["response"]["body"]["usage"] for one in answers]
    return RunFigures(
        num_prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        num_output_tokens=sum(usage["completion_tokens"] for usage in usages),
        busy_s=clock["write_file"] - clock["read_file"],
        prefix_sharing=counted["vllm:prefix_cache_hits_total"] / counted["vllm:prefix_cache_queries_total"],
        num_preempted=int(counted["vllm:num_preemptions_total"]),
        added_s_per_step=0.0,
        beside_s_per_step=0.0,
    )


def time_file(run_batch: Any, elapsed: Callable[[], float]) -> dict[str, float]:
    """Lets a clock note when the batch runner begins to read its file, after its endpoints are set up, and to
    write one, when it has every answer.

    Args:
        run_batch: the batch runner's module, whose functions are replaced.
        elapsed: the clock, in seconds.

    Returns:
        Times by `read_file` and `write_file`, there once it has run.
    """
    clock: dict[str, float] = {}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        async def noted(*arguments: Any) -> Any:
            clock[name] = elapsed()
            return await function(*arguments)

        return noted

    for name in ("read_file", "write_file"):
        setattr(run_batch, name, noting(name, getattr(run_batch, name)))
    return clock


def _run_policy(run: VersusRun) -> RunFigures:
    """The same file through our engine: read, tokenised, planned, answered; then written."""
    from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
    from blend_core.engines.vllm.engine import VllmEngine
    from blend_core.errors import EngineError
    from blend_core.planner import PlanConfig, build_plan
    from blend_core.tokenizing import Tokenizer
    from flows.bench.engine import numbered_requests, request_arrays
    from flows.bench.plan_process import smallest_job
    from flows.ingest.parse import ParseOptions, parse_line
    from flows.job_source import JobSource

    options = _options(run)
    engine = VllmEngine(options)
    info = engine.open()
    tokenizer = Tokenizer(Path(run.model_folder))
    planning = PlanConfig(
        run.name, run.block_size, sample_fraction=0, max_num_batched_tokens=run.max_num_batched_tokens
    )
    # Loads the planner's compiled code, or makes it where it is missing.
    build_plan(smallest_job(), info.model, info.device, planning)
    begin = time.perf_counter()
    parsing = ParseOptions("")
    drafts = [parse_line(line, parsing) for line in Path(run.request_file).read_bytes().splitlines()]
    prompts = tokenizer.encode_chat([draft.messages or [] for draft in drafts])
    requests = numbered_requests(
        (token_ids, draft.sampling) for draft, token_ids in zip(drafts, prompts, strict=True)
    )
    plan = build_plan(request_arrays(requests), info.model, info.device, planning)
    num_output = num_prompt = num_cached = num_preempted = 0
    answers = []
    busy_s = 0.0
    for event in engine.run(JobSource(plan, lambda seqs: [requests[seq] for seq in seqs])):
        if isinstance(event, RequestFinished):
            busy_s = time.perf_counter() - begin
            num_output += event.num_output_tokens
            num_prompt += event.num_prompt_tokens
            num_cached += event.num_cached_tokens
            answers.append({"custom_id": drafts[event.seq].custom_id, "text": event.output_text})
        elif isinstance(event, StepWindow):
            num_preempted += event.num_preempted
        elif isinstance(event, RequestFailed):
            raise EngineError(f"Request {event.seq} failed under {run.name}: {event.message}")
    Path(run.output_file).write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    engine.close()
    return RunFigures(
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        busy_s=busy_s,
        prefix_sharing=num_cached / num_prompt,
        num_preempted=num_preempted,
        added_s_per_step=engine.added_s / engine.num_steps,
        beside_s_per_step=engine.beside_s / engine.num_steps,
    )


if __name__ == "__main__":
    end_with_parent(sys.stdin.fileno())
    main(Path(sys.argv[1]))
