"""The stack under test: the real services of `blend up`, what runs in them, killing and starting again."""

import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from flows.cli.services import brought_up, local_stack
from flows.settings import EngineSettings, load_settings
from flows.wiring import Wiring
from infra.processes import ServiceProcess
from infra.supervisor import LocalStack

COMPONENTS = ("engine", "flow", "prefect", "s3", "postgres")
ENGINE = EngineSettings(
    dtype="float32", kv_gib=0.02, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, num_threads=1
)


class Stack:
    """The services of one throw-away state folder.

    Attributes:
        home: the state folder.
        admissions_file: what engines were given, as the observer writes it down.
        wiring: the parts of a process that works with the stack.
    """

    def __init__(self, home: Path, admissions_file: Path, local: LocalStack, wiring: Wiring) -> None:
        self.home = home
        self.admissions_file = admissions_file
        self.wiring = wiring
        self._local = local

    def heal(self, told: Callable[[str], None]) -> None:
        """Starts what is missing, as `blend up` does."""
        self._local.up(told, serve=True)

    def kill(self, component: str) -> bool:
        """SIGKILL to a component and what belongs to it; False where it does not run."""
        if component in ("engine", "flow"):
            victims = self.engine_processes() if component == "engine" else self.flow_processes()
        else:
            victims = self._service_processes(component)
        for process in victims:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        return bool(victims)

    def flow_processes(self) -> list[psutil.Process]:
        """The process of each flow run."""
        return [process for process in self._served() if _is_flow_run(process)]

    def engine_processes(self) -> list[psutil.Process]:
        """The engine processes of those."""
        return [process for process in self._served() if _is_engine(process)]

    def orphaned_engines(self) -> list[psutil.Process]:
        """Engine processes of this stack whose flow run is gone."""
        return [
            process
            for process in psutil.process_iter()
            if _is_engine(process) and self._is_ours(process) and process.ppid() == 1
        ]

    def pid(self, service: str) -> int | None:
        """The pid of a service's process in charge."""
        return ServiceProcess(service, self.home).pid

    def _service_processes(self, service: str) -> list[psutil.Process]:
        pid = self.pid(service)
        if pid is None:
            return []
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]

    def _served(self) -> list[psutil.Process]:
        pid = self.pid("serve")
        try:
            return [] if pid is None else psutil.Process(pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get("BLEND_HOME") == str(self.home)
        except (psutil.Error, OSError):
            return False


def _is_engine(process: psutil.Process) -> bool:
    return _runs(process, "blend_core.engines.process_child")


def _is_flow_run(process: psutil.Process) -> bool:
    # Prefect starts a fresh interpreter, by its own module or through multiprocessing.
    return _runs(process, "prefect.engine") or _runs(process, "spawn_main")


def _runs(process: psutil.Process, what: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and what in " ".join(process.cmdline())
    except psutil.Error:
        return False


@contextmanager
def stack_under_test(told: Callable[[str], None]) -> Iterator[Stack]:
    """A stack from nothing, and back to nothing at the end, with the observer in every process."""
    with tempfile.TemporaryDirectory(prefix="blend-faults-") as folder:
        home = Path(folder) / "home"
        admissions_file = Path(folder) / "admissions.jsonl"
        admissions_file.touch()
        _set_environment(home, admissions_file)
        settings = load_settings()
        local = local_stack(settings)
        try:
            with brought_up(settings) as wiring:
                local.up(told, serve=True)
                yield Stack(home, admissions_file, local, wiring)
        finally:
            local.erase(told)


def _set_environment(home: Path, admissions_file: Path) -> None:
    """Nothing of the caller's settings; what every process of the stack inherits."""
    for name in [name for name in os.environ if name.startswith(("BLEND_", "PREFECT_"))]:
        del os.environ[name]
    observer = Path(__file__).parent / "observer"
    paths = [str(observer), *filter(None, sys.path)]
    os.environ.update(
        {f"BLEND_ENGINE__{name.upper()}": str(value) for name, value in ENGINE.model_dump().items()},
        BLEND_HOME=str(home),
        BLENDSERVE_ADMISSIONS=str(admissions_file),
        PYTHONPATH=os.pathsep.join(dict.fromkeys(paths)),
        OMP_NUM_THREADS="1",
        PREFECT_RUNNER_POLL_FREQUENCY="1",
        PREFECT_SERVER_ANALYTICS_ENABLED="false",
        DO_NOT_TRACK="1",
    )
