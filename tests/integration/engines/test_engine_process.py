import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import psutil
import pytest

from blend_core.engines.base import RequestFinished, RequestsAdmitted, RequestsReleased
from blend_core.engines.process import EngineProcess
from blend_core.engines.torch.factory import make_torch_engine
from blend_core.errors import (
    ConfigurationError,
    EngineDiedError,
    EngineError,
    EngineStartError,
    StorageUnavailableError,
)
from blend_core.request import Request, SamplingParams
from flows.job_source import JobSource
from tests.integration.engines.doubles import make_echo
from tests.tiny_llama import make_tiny_llama
from tests.unit.engines_torch.runs import ListSource, options, plan_over, random_requests, request, run

LONG = SamplingParams(max_tokens=3000, temperature=0, ignore_eos=True)


def echo(mode: str = "") -> EngineProcess:
    return EngineProcess(partial(make_echo, mode))


def ten_requests() -> ListSource:
    return ListSource([request(seq, [1, 2, 3]) for seq in range(10)])


def ends_within(pid: int, seconds: float) -> bool:
    """Whether the process is gone, or only a zombie, before the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def open_and_run(process: EngineProcess) -> None:
    process.open()
    list(process.run(ten_requests()))


@pytest.fixture(scope="module")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny_llama")


def test_a_torch_engine_answers_alike_in_a_process_and_in_this_one(tiny_llama: Path) -> None:
    requests = random_requests(12)
    here = run(tiny_llama, requests)

    process = EngineProcess(partial(make_torch_engine, options(tiny_llama)))
    try:
        assert process.open().model.vocab_size == 1024
        events = list(process.run(ListSource(requests)))
    finally:
        process.close()

    tokens = {event.seq: event.output_token_ids for event in events if isinstance(event, RequestFinished)}
    assert tokens == here.tokens


@pytest.mark.parametrize("moment", ["at the first event", "in mid-step"])
def test_a_killed_engine_is_reported_and_leaves_nothing_behind(tiny_llama: Path, moment: str) -> None:
    process = EngineProcess(partial(make_torch_engine, options(tiny_llama)))
    process.open()
    pid = process.pid
    assert pid is not None
    requests = [request(0, range(3, 9)), *(request(seq, range(3, 9), LONG) for seq in range(1, 8))]
    if moment == "in mid-step":
        threading.Timer(0.3, os.kill, (pid, signal.SIGKILL)).start()

    events = process.run(ListSource(requests))
    if moment == "at the first event":
        next(events)
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError, match="SIGKILL") as died:
        list(events)

    assert died.value.retryable
    assert not psutil.pid_exists(pid)
    assert process.pid is None
    process.close()


def test_a_dead_engine_can_be_opened_again() -> None:
    process = echo()
    process.open()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDiedError):
        list(process.run(ten_requests()))

    process.open()
    assert len(list(process.run(ten_requests()))) == 10
    assert len(list(process.run(ten_requests()))) == 10
    process.close()


def test_what_is_asked_back_is_given_back_unless_it_has_started() -> None:
    requests = [request(seq, [1, 2, 3]) for seq in range(4)]
    source = JobSource(plan_over(requests), lambda seqs: [requests[seq] for seq in seqs])
    first, *others = source.plan().seq.tolist()
    process = echo("start the first")
    process.open()
    try:
        events = process.run(source)
        assert next(events) == RequestsAdmitted((first,))
        source.recall([first, *others[:2]])
        released, finished = events
    finally:
        process.close()

    assert released == RequestsReleased(seqs=tuple(others[:2]), kept=(first,))
    assert isinstance(finished, RequestFinished)
    assert finished.output_text == str(others[:2])


def test_close_kills_the_engines_own_children_too_and_removes_what_they_put_down() -> None:
    process = echo("grandchild")
    details = process.open().details
    grandchild, folder = int(details["pid"]), Path(details["folder"])
    assert psutil.pid_exists(grandchild)
    assert list(folder.iterdir())
    process.close()
    process.close()
    assert ends_within(grandchild, 5)
    assert not folder.exists()


def test_what_a_killed_engine_put_down_is_removed_before_anybody_asks_for_it() -> None:
    process = echo("grandchild")
    folder = Path(process.open().details["folder"])
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not folder.exists()
    process.close()


def test_each_engine_has_a_folder_of_its_own_for_temporary_files() -> None:
    one, other = echo("grandchild"), echo("grandchild")
    folders = {Path(process.open().details["folder"]) for process in (one, other)}
    one.close()
    assert len([folder for folder in folders if folder.exists()]) == 1
    other.close()
    assert Path(tempfile.gettempdir()) not in folders


def test_without_room_for_temporary_files_an_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    with pytest.raises(EngineStartError, match="let TMPDIR name a folder of yours"):
        echo().open()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_ends_with_its_parent(how: signal.Signals) -> None:
    with subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from tests.integration.engines import doubles; doubles.hold_an_engine_open()",
        ],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as parent:
        assert parent.stdout is not None
        *pids, folder = parent.stdout.readline().split()
        child, grandchild = map(int, pids)
        assert psutil.pid_exists(child)
        assert list(Path(folder).iterdir())
        parent.send_signal(how)

        assert ends_within(child, 5)
        assert ends_within(grandchild, 5)
        assert not Path(folder).exists()


def test_errors_cross_with_their_type_and_ids() -> None:
    process = echo("refuse")
    with pytest.raises(EngineStartError, match="no such device") as refused:
        process.open()
    assert refused.value.ids == {"rank": 3}
    assert process.pid is None


@pytest.mark.parametrize(
    ("mode", "name"),
    [("break in open", "RuntimeError"), ("break", "RuntimeError"), ("break on a file", "FileNotFoundError")],
)
def test_other_errors_cross_as_their_name_only(
    mode: str, name: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process = echo(mode)
    with pytest.raises(EngineError, match=name) as failed:
        open_and_run(process)
    assert "secret" not in str(failed.value)
    process.close()
    assert "secret" in capfd.readouterr().err


def test_an_answer_that_comes_after_the_error_is_for_nobody(capfd: pytest.CaptureFixture[str]) -> None:
    process = echo("break after a question")
    process.open()
    events = process.run(ten_requests())
    next(events)
    time.sleep(0.5)
    with pytest.raises(EngineDiedError, match="RuntimeError"):
        list(events)
    log = capfd.readouterr().err
    assert "after a question" in log
    assert "AssertionError" not in log


def test_an_exit_while_opening_names_its_status() -> None:
    with pytest.raises(EngineDiedError, match="exit status 7"):
        echo("exit in open").open()


def test_the_sources_own_error_comes_back() -> None:
    class BrokenSource(ListSource):
        def fetch(self, seqs: object) -> list[Request]:
            raise StorageUnavailableError("The object store did not answer; try again.", uri="s3://b/k")

    process = echo()
    process.open()
    with pytest.raises(StorageUnavailableError) as broken:
        list(process.run(BrokenSource([request(0, [1])])))
    assert broken.value.ids == {"uri": "s3://b/k"}
    process.close()


def test_revisions_and_withdrawals_reach_a_running_engine() -> None:
    source = ListSource([request(0, [1])])
    process = echo("wait for a change")
    process.open()
    events = process.run(source)
    assert isinstance(next(events), RequestFinished)
    source.withdrawals = [5]
    withdrawn = next(events)
    source.revisions = [plan_over([request(8, [1])], revision=4)]
    revised = next(events)
    assert isinstance(withdrawn, RequestFinished)
    assert isinstance(revised, RequestFinished)
    assert (withdrawn.seq, revised.seq, revised.revision) == (5, 8, 4)
    process.close()


def test_a_run_given_up_half_way_closes_the_engine() -> None:
    process = echo()
    process.open()
    pid = process.pid
    assert pid is not None
    events = process.run(ten_requests())
    next(events)
    events.close()  # type: ignore[attr-defined]  # a generator behind the iterator
    assert not psutil.pid_exists(pid)
    with pytest.raises(EngineError, match="not open"):
        process.run(ten_requests())


def test_a_run_leaves_no_answer_behind_for_the_next_one() -> None:
    process = echo("look for changes last")
    process.open()
    for _ in range(3):
        assert len(list(process.run(ten_requests()))) == 10
    process.close()


def test_a_forgotten_run_does_not_close_a_later_engine() -> None:
    process = echo()
    process.open()
    forgotten = process.run(ten_requests())
    next(forgotten)
    process.close()
    process.open()
    forgotten.close()  # type: ignore[attr-defined]  # a generator behind the iterator
    assert len(list(process.run(ten_requests()))) == 10
    process.close()


def test_closing_from_another_thread_ends_the_wait_for_an_event() -> None:
    process = echo("wait for a change")
    process.open()
    events = process.run(ListSource([request(0, [1])]))
    next(events)
    threading.Timer(0.3, process.close).start()
    with pytest.raises(EngineDiedError):
        next(events)


def test_killing_from_another_thread_is_told_as_the_engines_death() -> None:
    process = echo("wait for a change")
    process.kill()
    process.open()
    events = process.run(ListSource([request(0, [1])]))
    next(events)
    threading.Timer(0.3, process.kill).start()
    with pytest.raises(EngineDiedError, match="SIGKILL"):
        next(events)


def test_nothing_is_killed_in_place_of_an_engine_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    process = echo()
    process.open()
    process.kill()
    killed: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: killed.append(group))
    # Its number may be another group's by now.
    process.kill()
    process.close()
    assert not killed


def test_an_answer_that_cannot_be_sent_ends_the_run() -> None:
    class SourceOfLocks(ListSource):
        def fetch(self, seqs: object) -> list[Request]:
            return [threading.Lock()]  # type: ignore[list-item]  # the fault under test

    process = echo()
    process.open()
    pid = process.pid
    assert pid is not None
    with pytest.raises(EngineError, match="TypeError"):
        list(process.run(SourceOfLocks([request(0, [1])])))
    assert not psutil.pid_exists(pid)


def test_a_slow_reader_loses_nothing() -> None:
    source = ListSource([request(seq, [1]) for seq in range(1000)])
    process = echo()
    process.open()
    seqs = []
    for event in process.run(source):
        assert isinstance(event, RequestFinished)
        if event.seq == 0:
            time.sleep(1)
            assert source.num_fetched < 1000, "the engine ran ahead of its reader without bound"
        seqs.append(event.seq)
    assert seqs == list(range(1000))
    process.close()


def test_what_an_engine_prints_goes_to_the_logs(capfd: pytest.CaptureFixture[str]) -> None:
    process = echo("print")
    process.open()
    list(process.run(ten_requests()))
    process.close()
    assert "on standard output" not in capfd.readouterr().out


def test_an_engine_is_started_from_any_thread() -> None:
    process = echo()
    starter = threading.Thread(target=process.open)
    starter.start()
    starter.join()
    time.sleep(1)
    assert len(list(process.run(ten_requests()))) == 10
    process.close()


def test_a_factory_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="importable module"):
        EngineProcess(lambda: make_echo())


def test_a_factory_of_the_program_itself_is_refused_with_what_to_do() -> None:
    program = (
        "from tests.integration.engines import doubles\n"
        "def make():\n    return doubles.EchoEngine()\n"
        "doubles.print_why_an_engine_does_not_open(make)\n"
    )
    output = subprocess.run(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ).stdout
    assert output.startswith("ConfigurationError: The engine process cannot import the engine factory")
    assert "importable module" in output
