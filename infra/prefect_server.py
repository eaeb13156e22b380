"""The embedded Prefect server, and the process that serves the deployments to it."""

import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from datetime import datetime
from http.client import HTTPConnection, HTTPException
from pathlib import Path

from infra.processes import ServiceProcess
from infra.state import StackConfig, StackState

QUIET = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


class PrefectService:
    """The embedded Prefect server: API, pages and scheduler, with its SQLite database in the state folder."""

    __slots__ = ("_config", "_prefect_home", "process")

    name = "prefect"
    start_timeout_s = 120.0

    def __init__(self, home: Path, config: StackConfig) -> None:
        """Changes nothing.

        Args:
            home: the state folder.
            config: the port.
        """
        self._config = config
        self._prefect_home = home / "prefect"
        self.process = ServiceProcess(self.name, home)

    @property
    def url(self) -> str:
        """The API."""
        return self._config.prefect_api_url

    def launch(self) -> None:
        """Start it without the settings of the caller's Prefect: it must not serve another's database."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
        database = self._prefect_home / "prefect.db"
        self.process.launch(
            [
                *(sys.executable, "-m", "prefect", "server", "start"),
                *("--host", "127.0.0.1", "--port", str(self._config.prefect_port)),
            ],
            environment={
                **environment,
                **QUIET,
                "PREFECT_HOME": str(self._prefect_home),
                "PREFECT_API_URL": self.url,
                "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{database}",
                # Event tables grow without end otherwise.
                "PREFECT_SERVER_EVENTS_RETENTION_PERIOD": "P7D",
            },
            # Prefect reads settings from files of the folder it starts in.
            working_directory=self._prefect_home,
        )

    def is_ready(self) -> bool:
        """Whether it calls itself healthy."""
        return _call(self._config.prefect_port, "GET", "/api/health") is True

    def prepare(self) -> None:
        """Nothing: it makes its database itself."""

    def stop(self) -> None:
        """It may take the first SIGTERM for a request to finish what it does, and the second for an order."""
        self.process.stop([(signal.SIGTERM, 10.0), (signal.SIGTERM, 5.0)])


class ServeService:
    """The process that serves the deployments: it polls Prefect and starts a process per flow run."""

    __slots__ = ("_command", "_home", "_is_prefect_embedded", "_settings_file", "_state", "process")

    name = "serve"
    url = None
    start_timeout_s = 120.0

    def __init__(
        self,
        home: Path,
        state: StackState,
        *,
        command: Sequence[str],
        settings_file: Path | None,
        is_prefect_embedded: bool,
    ) -> None:
        """Changes nothing.

        Args:
            home: the state folder.
            state: the services that it works with.
            command: what serves the deployments.
            settings_file: has settings beside the environment.
            is_prefect_embedded: whether the Prefect server can be asked without credentials.
        """
        self._home = home
        self._state = state
        self._command = list(command)
        self._settings_file = settings_file
        self._is_prefect_embedded = is_prefect_embedded
        self.process = ServiceProcess(self.name, home)

    @property
    def _temporary_folder(self) -> Path:
        return self._home / "prefect" / "tmp"

    @property
    def is_current(self) -> bool:
        """Whether the running process was started with the services and settings of now."""
        return self.process.fingerprint == self._fingerprint(self._environment())

    def launch(self) -> None:
        """Start it in the caller's folder, with the caller's settings."""
        environment = self._environment()
        self.process.end_leftovers()
        shutil.rmtree(self._temporary_folder, ignore_errors=True)
        self._temporary_folder.mkdir(mode=0o700, parents=True)
        self.process.launch(
            self._command, environment=environment, fingerprint=self._fingerprint(environment)
        )

    def is_ready(self) -> bool:
        """Whether it has asked for runs of its deployments since its start."""
        since = self.process.since
        if since is None:
            return False
        if not self._is_prefect_embedded:
            # Asking a Prefect of the user's may need his credentials: a process that has stayed up will do.
            return (datetime.now(since.tzinfo) - since).total_seconds() > 5.0
        port = int(self._state.prefect_api_url.rsplit(":", 1)[1].split("/")[0])
        deployments = _call(port, "POST", "/api/deployments/filter", {"limit": 200})
        if not isinstance(deployments, list):
            return False
        polls = [
            datetime.fromisoformat(found["last_polled"]) for found in deployments if found["last_polled"]
        ]
        return any(polled >= since for polled in polls)

    def prepare(self) -> None:
        """Nothing."""

    def stop(self) -> None:
        """End it and the flow runs that it started."""
        self.process.stop([(signal.SIGTERM, 15.0), (signal.SIGTERM, 5.0)])

    def _environment(self) -> dict[str, str]:
        environment = {
            **os.environ,
            **QUIET,
            "BLEND_HOME": str(self._home),
            # Prefect's runner makes a folder of a fixed name there, which in /tmp may be another user's.
            "TMPDIR": str(self._temporary_folder),
            **_settings_of(self._state),
            # A poll every 10 s is the default: a run started in the pages would wait that long.
            "PREFECT_RUNNER_POLL_FREQUENCY": os.environ.get("PREFECT_RUNNER_POLL_FREQUENCY", "2"),
        }
        if self._is_prefect_embedded:
            environment["PREFECT_HOME"] = str(self._home / "prefect")
        # The embedded services are never behind a proxy.
        for name in ("NO_PROXY", "no_proxy"):
            environment[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))
        return environment

    def _fingerprint(self, environment: dict[str, str]) -> str:
        settings = {
            name: value for name, value in environment.items() if name.startswith(("BLEND_", "PREFECT_"))
        }
        file = self._settings_file
        more = file.read_bytes().hex() if file is not None and file.is_file() else ""
        text = json.dumps([settings, more, self._command], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


def _settings_of(state: StackState) -> dict[str, str]:
    """The services as the platform's settings name them."""
    settings = {
        "BLEND_DATABASE__URL": state.database_url,
        "BLEND_DATABASE__READ_ONLY_URL": state.read_only_database_url,
        "BLEND_OBJECT_STORE__ENDPOINT_URL": state.s3_endpoint_url,
        "BLEND_OBJECT_STORE__BUCKET": state.s3_bucket,
        "BLEND_OBJECT_STORE__REGION": state.s3_region,
        "BLEND_OBJECT_STORE__ACCESS_KEY": state.s3_access_key,
        "BLEND_OBJECT_STORE__SECRET_KEY": state.s3_secret_key,
        "PREFECT_API_URL": state.prefect_api_url,
    }
    return {name: value for name, value in settings.items() if value is not None}


def _call(port: int, method: str, path: str, body: object = None) -> object:
    """The JSON answer of the embedded server, asked past any proxy; None where there is no good one."""
    connection = HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request(
            method, path, None if body is None else json.dumps(body), {"Content-Type": "application/json"}
        )
        response = connection.getresponse()
        answer: object = json.loads(response.read())
        return answer if response.status == 200 else None
    except (OSError, HTTPException, ValueError):
        return None
    finally:
        connection.close()
