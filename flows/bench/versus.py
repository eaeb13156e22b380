"""The vLLM engine under each policy beside vLLM's own batch runner: one file, model and settings."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import BinaryIO, Final

from blend_core.engines.vllm.installed import installed_vllm, why_not_vllm
from blend_core.errors import ConfigurationError, EngineError
from blend_core.model_store import ModelStore
from flows.bench.versus_file import write_request_file
from flows.bench.versus_process import RUN_BATCH, RunFigures, VersusRun
from flows.settings import Settings

RANDOM_MODEL: Final = "random-llama"
RANDOM_HIDDEN_SIZE: Final = 256
"""Of the random model: enough that a step's time is that of its tokens, and a run still takes seconds."""

NAMES: Final = (RUN_BATCH, "fcfs", "dfs", "dual_scan", "density_matched")
"""Ways to run the file: vLLM's own batch runner, and our policies."""

SCARCE_KV_BLOCKS: Final = 600
"""KV of fewer tokens than the requests that may be in flight come to, so that order and admission matter."""

AMPLE_KV_BLOCKS: Final = 16_384
"""KV for all that may be in flight at once, whatever the order."""

BLOCK_SIZE: Final = 32
MAX_NUM_SEQS: Final = 128
MAX_NUM_BATCHED_TOKENS: Final = 1024
MAX_MODEL_LEN: Final = 4096
"""Settings of vLLM that all ways have in common."""


@dataclass(frozen=True, slots=True)
class VersusFigures:
    """One way to run the file: medians over the rounds.

    Attributes:
        name: `run-batch`, or a policy of ours.
        output_tokens_per_s: output tokens per second from opening the file to the last answer.
        output_tokens_per_s_range: least and most.
        ratio_to_run_batch: to that of `run-batch` in the same round.
        ratio_range: least and most.
        process_s: the whole process, loading the model included.
        prefix_sharing: share of prompt tokens that came from the cache.
        num_preempted: preemptions.
        added_s_per_step: what a step waits for our part of the scheduler, in the mean.
        beside_s_per_step: what that part does while the step is computed.
    """

    name: str
    output_tokens_per_s: float
    output_tokens_per_s_range: tuple[float, float]
    ratio_to_run_batch: float
    ratio_range: tuple[float, float]
    process_s: float
    prefix_sharing: float
    num_preempted: int
    added_s_per_step: float
    beside_s_per_step: float


@dataclass(frozen=True, slots=True)
class KvSetting:
    """One size of the KV cache.

    Attributes:
        kv: `scarce` or `ample`.
        kv_blocks: blocks of it.
        runs: one entry per name, in the order of `NAMES`.
    """

    kv: str
    kv_blocks: int
    runs: tuple[VersusFigures, ...]


@dataclass(frozen=True, slots=True)
class EngineVersus:
    """The whole comparison.

    Attributes:
        engine: `vllm`, with its version.
        model: the model's name.
        settings: scarce KV, then ample.
    """

    engine: str
    model: str
    settings: tuple[KvSetting, ...]


def run_versus_bench(
    settings: Settings,
    model: str,
    num_requests: int,
    num_rounds: int,
    tell: Callable[[str], None],
) -> EngineVersus:
    """Runs every way in turn, round after round, each in a fresh process.

    Raises:
        ConfigurationError: vLLM is not there, or the model is not known.
        EngineError: a process failed, or two ways did not compute the same prompts.
    """
    found = installed_vllm()
    why_not = why_not_vllm(settings.engine.device, found)
    if found is None or why_not is not None:
        raise ConfigurationError(f"The comparison cannot run: {why_not}")
    tell(f"vllm {found.version} under each policy, beside its own batch runner (run-batch)")
    kv_blocks = {"scarce": SCARCE_KV_BLOCKS, "ample": AMPLE_KV_BLOCKS}
    measured: dict[tuple[str, str], list[tuple[RunFigures, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="blend-versus-") as name:
        folder = Path(name)
        requests = folder / "requests.jsonl"
        write_request_file(requests, num_requests, seed=0)
        base = VersusRun(
            name="",
            model_folder=str(_model_folder(settings, model, folder)),
            request_file=str(requests),
            output_file=str(folder / "answers.jsonl"),
            figures_file=str(folder / "figures.json"),
            device=settings.engine.device,
            device_profile=settings.engine.device_profile,
            dtype="float32" if settings.engine.device == "cpu" else "bfloat16",
            block_size=BLOCK_SIZE,
            kv_blocks=0,
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            num_threads=settings.engine.num_threads,
        )
        for number in range(num_rounds):
            for kv, blocks in kv_blocks.items():
                # Every second round goes the other way, so that nobody always comes after the same one.
                for one in NAMES if number % 2 == 0 else tuple(reversed(NAMES)):
                    figures, process_s = _measure(replace(base, name=one, kv_blocks=blocks), folder)
                    measured.setdefault((kv, one), []).append((figures, process_s))
                    check_prompts(measured)
                    rate = figures.num_output_tokens / figures.busy_s
                    tell(
                        f"round {number + 1}, {kv} KV, {one}: {rate:,.0f} output tokens/s, {process_s:.0f} s"
                    )
    return EngineVersus(
        f"vllm {found.version}",
        model,
        tuple(
            KvSetting(kv, blocks, tuple(_summary(one, kv, measured) for one in NAMES))
            for kv, blocks in kv_blocks.items()
        ),
    )


def check_prompts(measured: Mapping[tuple[str, str], Sequence[tuple[RunFigures, float]]]) -> None:
    """Sees to it that all runs had the same work.

    Args:
        measured: figures and seconds of each run, by the size of KV and the way to run the file.

    Raises:
        EngineError: prompts of one run came to another number of tokens than those of the first.
    """
    runs = [(name, one.num_prompt_tokens) for (_, name), pairs in measured.items() for one, _ in pairs]
    first, num_tokens = runs[0]
    for name, other in runs:
        if other != num_tokens:
            raise EngineError(
                f"The prompts are {num_tokens:,} tokens under {first} and {other:,} under {name}, so that "
                "speeds cannot be compared; take a model whose chat template vLLM applies as we do."
            )


def _model_folder(settings: Settings, model: str, folder: Path) -> Path:
    if model != RANDOM_MODEL:
        return ModelStore(settings.home / "models").resolve(model)
    from flows.bench.random_llama import make_random_llama

    return make_random_llama(
        folder / RANDOM_MODEL, hidden_size=RANDOM_HIDDEN_SIZE, max_model_len=MAX_MODEL_LEN
    )


def _measure(run: VersusRun, folder: Path) -> tuple[RunFigures, float]:
    description, figures_file = folder / "run.json", Path(run.figures_file)
    figures_file.unlink(missing_ok=True)
    run.save(description)
    log = folder / "log.txt"
    begin = time.perf_counter()
    with log.open("wb") as output:
        status = run_process(description, output)
    process_s = time.perf_counter() - begin
    if status != 0 or not figures_file.is_file():
        last = log.read_text(errors="replace").strip().splitlines()[-1:]
        raise EngineError(f"The run of {run.name} ended with status {status}: {' '.join(last)}")
    return RunFigures(**json.loads(figures_file.read_text())), process_s


def run_process(description: Path, log: BinaryIO) -> int:
    """Runs what a `VersusRun`'s file says to its end; returns its exit status.

    The process and what it starts are a group of their own, which ends with this process, by the pipe that is
    its standard input, and when this is interrupted.
    """
    process = subprocess.Popen(  # noqa: S603 - this interpreter, this package
        [sys.executable, "-m", "flows.bench.versus_process", str(description)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        return process.wait()
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _summary(
    name: str, kv: str, measured: dict[tuple[str, str], list[tuple[RunFigures, float]]]
) -> VersusFigures:
    def rates(of: str) -> list[float]:
        return [figures.num_output_tokens / figures.busy_s for figures, _ in measured[(kv, of)]]

    own = rates(name)
    ratios = [rate / other for rate, other in zip(own, rates(RUN_BATCH), strict=True)]
    runs = [figures for figures, _ in measured[(kv, name)]]
    return VersusFigures(
        name=name,
        output_tokens_per_s=median(own),
        output_tokens_per_s_range=(min(own), max(own)),
        ratio_to_run_batch=median(ratios),
        ratio_range=(min(ratios), max(ratios)),
        process_s=median(process_s for _, process_s in measured[(kv, name)]),
        prefix_sharing=median(figures.prefix_sharing for figures in runs),
        num_preempted=round(median(figures.num_preempted for figures in runs)),
        added_s_per_step=median(figures.added_s_per_step for figures in runs),
        beside_s_per_step=median(figures.beside_s_per_step for figures in runs),
    )
