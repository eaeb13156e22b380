"""vLLM's core in a process of its own, as in production; the engine in its process group."""

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import cast

import psutil
import pytest

from blend_core.engines.base import EngineEvent, RequestFinished, RequestsAdmitted
from blend_core.engines.process import EngineProcess
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.factory import make_vllm_engine
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.engines.vllm.remote_control import RemoteControl
from blend_core.engines.vllm.reports import Admitted
from blend_core.errors import ConfigurationError, EngineDiedError, EngineStartError, RequestErrorCode
from blend_core.model_store import ModelStore
from blend_core.plan import Plan
from blend_core.request import SamplingParams
from blend_core.tokenizing import Tokenizer
from tests.integration.engines_vllm.vllm_runs import BLOCK_SIZE, Block32Source, options
from tests.unit.engines_torch.runs import Outcome, random_requests, request

LONG = SamplingParams(max_tokens=600, temperature=0, ignore_eos=True)
SCHEMA = SamplingParams(40, temperature=0, json_schema='{"enum": ["a", "b"]}')


def separate(folder: Path) -> VllmEngineOptions:
    passed = {"separate_core": True, "num_gpu_blocks_override": 121}
    return options(folder, max_num_seqs=16, max_num_batched_tokens=128, passed=passed)


def group(pid: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.slow
def test_a_core_of_its_own_answers_dies_with_its_suspects_told_and_leaves_nothing(tiny_llama: Path) -> None:
    process = EngineProcess(partial(make_vllm_engine, separate(tiny_llama)))
    try:
        assert process.open().details["separate_core"] == "true"
        pid = process.pid
        assert pid is not None
        requests = [*random_requests(30), request(30, range(3, 9), SCHEMA), request(31, [])]
        outcome = Outcome()
        for event in process.run(Block32Source(requests, policy="fcfs")):
            outcome.add(event)
        assert sorted(outcome.finished) == list(range(31))
        assert outcome.finished[30].output_text in ('"a"', '"b"')
        assert list(outcome.failed) == [31]
        assert outcome.total("num_decode_tokens") >= 30 * 15

        (core,) = [one for one in group(pid) if "EngineCore" in " ".join(one.cmdline())]
        # Far more than it can do until it is killed.
        events = process.run(Block32Source([request(seq, range(3, 9), LONG) for seq in range(100)]))
        outcome = Outcome()

        def take_and_kill(event: EngineEvent) -> None:
            outcome.add(event)
            # vLLM may start the first request before the second has reached it.
            if isinstance(event, RequestsAdmitted) and len(outcome.admitted) >= 4 and core.is_running():
                os.kill(core.pid, signal.SIGKILL)

        with pytest.raises(EngineDiedError, match="ended"):
            deque(map(take_and_kill, events))
        assert outcome.admitted[:4] == [0, 1, 2, 3]
        deadline = time.monotonic() + 10
        while group(pid) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not group(pid)
    finally:
        process.close()


class Remote:
    """A scheduler's process that is never sent a request; it knows only what a run tells it.

    Attributes:
        waiting: what it would name next.
    """

    def __init__(self, num_requests: int) -> None:
        self.waiting = list(range(num_requests))

    def start(self, policy: str, plan: Plan) -> int:
        return 1

    def upcoming(self, num_requests: int) -> list[int]:
        return self.waiting[:num_requests]

    def withdraw(self, seqs: list[int], queued: list[int]) -> None:
        self.waiting = [seq for seq in self.waiting if seq not in seqs]

    def reports(self, timeout_s: float = 0.0) -> Iterator[Admitted]:
        yield from ()

    def tell_all(self) -> None:
        pass


class DyingRemote(Remote):
    """A scheduler's process that died after it had told of an admission, which nobody has read."""

    log = SimpleNamespace(words=lambda: "RuntimeError: out of luck")

    def withdraw(self, seqs: list[int], queued: list[int]) -> None:
        raise EngineDiedError("The scheduler is gone.")

    def reports(self, timeout_s: float = 0.0) -> Iterator[Admitted]:
        if timeout_s > 0.0:
            yield Admitted((0,), 0)
            raise EngineDiedError("The scheduler is gone.")


def test_a_core_that_died_unnoticed_has_its_suspects_told(engine_apart: VllmEngine) -> None:
    # What imports vLLM.
    from vllm.v1.engine.exceptions import EngineDeadError

    from blend_core.engines.vllm.core import RemoteCore
    from blend_core.engines.vllm.run import Run

    outputs: Queue[object] = Queue()
    answers = deque([SimpleNamespace(finished=False)])

    def add_request(request_id: str, *_: object, **__: object) -> None:
        if request_id == "1":
            outputs.put(None)
            raise EngineDeadError

    def step() -> list[object]:
        outputs.get()
        return [answers.popleft()]

    llm_engine = SimpleNamespace(
        engine_core=SimpleNamespace(outputs_queue=outputs), add_request=add_request, step=step
    )
    core = RemoteCore(llm_engine, cast(RemoteControl, DyingRemote(2)))
    opened = replace(engine_apart._opened, core=core)
    source = Block32Source([request(seq, range(3, 9)) for seq in range(2)])
    outcome = Outcome()

    events = Run(opened, source, time.time, time.monotonic).events()
    with pytest.raises(EngineDiedError, match=r"engine core ended \(RuntimeError: out of luck\)"):
        deque(map(outcome.add, events))

    assert outcome.admitted == [0]
    assert not answers, "what it had answered was read"


def test_what_the_core_cannot_even_queue_fails_and_is_not_named_again(engine_apart: VllmEngine) -> None:
    # What imports vLLM.
    from blend_core.engines.vllm.core import RemoteCore
    from blend_core.engines.vllm.run import Run

    outputs: Queue[SimpleNamespace] = Queue()

    def add_request(request_id: str, *_: object, **__: object) -> None:
        failed = SimpleNamespace(finish_reason="error", text="", token_ids=())
        outputs.put(SimpleNamespace(request_id=request_id, finished=True, outputs=[failed]))

    llm_engine = SimpleNamespace(
        engine_core=SimpleNamespace(outputs_queue=outputs),
        add_request=add_request,
        step=lambda: [outputs.get()],
    )
    core = RemoteCore(llm_engine, cast(RemoteControl, Remote(200)))
    opened = replace(engine_apart._opened, core=core)
    source = Block32Source([request(seq, range(3, 9)) for seq in range(200)])
    outcome = Outcome()

    deque(map(outcome.add, Run(opened, source, time.time, time.monotonic).events()))

    assert sorted(outcome.failed) == list(range(200))
    assert {event.code for event in outcome.failed.values()} == {RequestErrorCode.ENGINE_FAILED}


@pytest.mark.slow
def test_vllm_that_cannot_start_says_why(tiny_llama: Path) -> None:
    process = EngineProcess(
        partial(
            make_vllm_engine, options(tiny_llama, passed={"separate_core": False, "quantization": "fp8x"})
        )
    )
    try:
        with pytest.raises(EngineStartError, match=r"vLLM did not start \(ValidationError: .*quantization"):
            process.open()
    finally:
        process.close()


def test_a_process_that_has_loaded_numba_is_told_to_start_another(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llvmlite", ModuleType("llvmlite"))
    with pytest.raises(EngineStartError, match="in an `EngineProcess`"):
        VllmEngine(options(tiny_llama, passed={"separate_core": False})).open()


@pytest.fixture
def smollm2(tmp_path: Path) -> Path:
    """The demo model, fetched."""
    try:
        return ModelStore(tmp_path / "models").add("smollm2-135m").folder
    except ConfigurationError as error:
        if "cannot be fetched" in error.message and os.environ.get("CI") != "true":
            pytest.skip(error.message)
        raise


@pytest.mark.slow
def test_a_real_model_answers(smollm2: Path) -> None:
    changes = {"dtype": "bfloat16", "passed": {"separate_core": False, "num_gpu_blocks_override": 65}}
    process = EngineProcess(
        partial(make_vllm_engine, options(smollm2, max_num_batched_tokens=256, **changes))
    )
    chats = [[{"role": "user", "content": "What is the capital of France?"}]] * 2
    prompts = Tokenizer(smollm2).encode_chat(chats)
    asked = [request(seq, ids.tolist(), SamplingParams(12, temperature=0)) for seq, ids in enumerate(prompts)]
    try:
        process.open()
        events = list(process.run(Block32Source(asked)))
    finally:
        process.close()
    answers = [event for event in events if isinstance(event, RequestFinished)]
    assert len(answers) == 2
    assert all("Paris" in event.output_text for event in answers)
    assert {event.num_cached_tokens % BLOCK_SIZE for event in answers} == {0}
