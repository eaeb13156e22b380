import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection

import pytest

from blend_core.engines.base import RequestFailed, RequestFinished, StepWindow
from blend_core.errors import RequestErrorCode
from storage.database import Database
from storage.jobs import create_job
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.requests import RequestRow, RequestWriter
from storage.runs import start_run


@pytest.fixture
def make_job(db: Database) -> Callable[..., str]:
    """Makes a job with `num_valid` requests and then `num_bad` error rows."""

    def make(num_valid: int = 3, num_bad: int = 0) -> str:
        job_id = create_job(db, name="test", model="tiny", spec={})
        with RequestWriter(db, job_id) as writer:
            for seq in range(num_valid):
                writer.add(
                    RequestRow(
                        seq,
                        "s3://in/a.jsonl",
                        seq + 1,
                        custom_id=f"id-{seq}",
                        endpoint="/v1/chat/completions",
                        num_prompt_tokens=10,
                        max_tokens=20,
                        prompt_excerpt="Hello",
                        shard_index=0,
                    )
                )
            for seq in range(num_valid, num_valid + num_bad):
                row = RequestRow(seq, "s3://in/a.jsonl", seq + 1, prompt_excerpt="{broken")
                writer.add_error(row, RequestErrorCode.INVALID_JSON, "The line is no JSON; correct it.")
        return job_id

    return make


@pytest.fixture
def take_job(db: Database) -> Callable[[str], Run]:
    """Starts a run of a job."""
    return lambda job_id: start_run(db, job_id, engine="none", policy="fcfs", details={}, lease_s=60)


@pytest.fixture
def answer() -> Callable[..., RequestFinished]:
    """Makes an answer."""

    def make(seq: int, text: str = "Paris.", finished_at: float = 1_700_000_001.5) -> RequestFinished:
        return RequestFinished(seq, 0, text, (1, 2, 3), "stop", 10, 4, 1_700_000_000.25, finished_at)

    return make


@pytest.fixture
def failure() -> Callable[[int], RequestFailed]:
    """Makes a failure."""
    return lambda seq: RequestFailed(
        seq, 0, RequestErrorCode.TIMED_OUT, "It took longer than 5 s.", 1_700_000_002.0
    )


@pytest.fixture
def make_window() -> Callable[..., StepWindow]:
    """Makes a window that lasts one second."""

    def make(batch_index: int = 0, memory_s: float = 0.5) -> StepWindow:
        return StepWindow(
            batch_index, 0, 1_700_000_000.0 + batch_index, 1.0, 0.9, 64, 1000, 500, 200, 7, 10_000, 20_000,
            0.25, memory_s, 0.75, 3.5, 4.5, 1, 9,
        )  # fmt: skip

    return make


@pytest.fixture(scope="session")
def moto_options() -> Iterator[ObjectStoreOptions]:
    """A second S3 server of another make, whose conditional requests are right."""
    command = [sys.executable, "-c", _MOTO]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        deadline_s = time.monotonic() + 30
        while not _answers(port):
            assert time.monotonic() < deadline_s, "moto did not start"
            time.sleep(0.05)
        yield ObjectStoreOptions(f"moto-{secrets.token_hex(4)}", f"http://127.0.0.1:{port}", "key", "secret")
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


_MOTO = """
from moto.server import ThreadedMotoServer
import threading
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
threading.Event().wait()
"""


def _answers(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture(params=["nanio", "moto"])
def any_objects(request: pytest.FixtureRequest) -> ObjectStore:
    """A bucket of each of the two servers in turn."""
    if request.param == "nanio":
        store: ObjectStore = request.getfixturevalue("objects")
        return store
    store = ObjectStore(request.getfixturevalue("moto_options"))
    store.ensure_bucket()
    store.delete(store.keys(""))
    return store
