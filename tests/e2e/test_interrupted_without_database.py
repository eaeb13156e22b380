"""`blend run` is interrupted twice while its database is away: it ends, and the next run continues."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from flows.progress import SilentProgress
from flows.running import create_job, run_job
from flows.wiring import Wiring
from storage.results import counts

pytestmark = [pytest.mark.postgres, pytest.mark.s3, pytest.mark.slow]

RUN_MAIN = "from flows.cli import main; main()"


class Proxy:
    """A way to a server that can be cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets = [self._listener]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for each in self._sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._target)
            self._sockets += [client, server]
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture
def proxy(wiring: Wiring) -> Iterator[Proxy]:
    parts = urlsplit(wiring.database.url)
    assert parts.hostname is not None
    assert parts.port is not None
    made = Proxy(parts.hostname, parts.port)
    yield made
    made.cut()


def test_a_second_interrupt_ends_the_run_within_seconds(
    wiring: Wiring, environment: dict[str, str], make_job: Any, proxy: Proxy, tmp_path: Path
) -> None:
    job_id = create_job(wiring, make_job(num_chats=200, max_tokens=100))
    parts = urlsplit(wiring.database.url)
    netloc = f"{parts.username}:{parts.password}@127.0.0.1:{proxy.port}"
    variables = {**os.environ, **environment, "BLEND_DATABASE__URL": parts._replace(netloc=netloc).geturl()}
    with (tmp_path / "out").open("w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN_MAIN, "run", "--job-id", job_id, "--json"],
            env=variables,
            stdout=out,
        )
    try:
        deadline_s = time.monotonic() + 90
        while counts(wiring.database, job_id).succeeded < 10:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)
        proxy.cut()
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        time.sleep(3)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.wait(10)
    finally:
        process.kill()
        process.wait()

    assert process.returncode != 0
    assert json.loads((tmp_path / "out").read_text())["error"]["job_id"] == job_id
    assert run_job(wiring, job_id, SilentProgress()).succeeded == 200
