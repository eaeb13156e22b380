"""The vLLM engine: opens a model once, runs sources on it."""

import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any, Final

from blend_core.engines.base import EngineEvent, EngineInfo, RequestSource
from blend_core.engines.vllm.error_words import start_error, words_of
from blend_core.engines.vllm.installed import installed_vllm, why_not_vllm
from blend_core.engines.vllm.options import VllmEngineOptions
from blend_core.engines.vllm.passed_options import AS_LONG_AS_FITS
from blend_core.engines.vllm.remote_control import ADDRESS_KEY, RemoteControl
from blend_core.errors import ConfigurationError, EngineDiedError, EngineError, EngineStartError
from blend_core.policies.factory import POLICY_NAMES
from blend_core.specs import load_model_spec

_ADMISSIONS_TOLD: Final = 16
"""Room for admissions that a run has not read, in requests that may be in flight: it has handed over at most
twelve times as many (`RequestWindow`)."""

_CORE_FAILED: Final = "Engine core initialization failed"
"""What vLLM says of a core that ended while it loaded."""

_CPU_WORKER: Final = "blend_core.engines.vllm.cpu_worker.SeededCPUWorker"
"""By name alone: vLLM's worker for CPUs alters torch in the process that imports it."""


class VllmEngine:
    """An `Engine` whose steps are vLLM's. One run at a time; one in a process, since vLLM reads its
    environment once.

    Attributes:
        added_s: what steps waited for our part of vLLM's scheduler, over all of the latest run.
        beside_s: what it took beside that, while steps were computed.
        num_steps: those steps.
    """

    name = "vllm"

    def __init__(
        self,
        options: VllmEngineOptions,
        *,
        now: Callable[[], float] = time.time,
        elapsed: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Loads nothing yet.

        Args:
            options: what `open` loads.
            now: seconds since the epoch.
            elapsed: a clock for durations.
        """
        self._options = options
        self._now = now
        self._elapsed = elapsed
        self._opened: Any = None
        self._run: Any = None
        self._events: Generator[EngineEvent] | None = None

    def open(self) -> EngineInfo:
        """Loads vLLM and the model; a second call returns the same facts.

        Raises:
            ConfigurationError: vLLM is not there or not for this device, or an option makes no sense.
            EngineStartError: vLLM did not start, or cannot in this process, or cannot use a LoRA adapter.
            EngineDiedError: its core ended without a word while it loaded.
        """
        if self._opened is None:
            self._opened = self._load()
        info: EngineInfo = self._opened.info
        return info

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        """Runs everything in the source; see `Engine.run`. A run that is not over is given up."""
        if self._opened is None:
            raise EngineError("The engine is not open; call open() before run().")
        from blend_core.engines.vllm.run import Run

        if self._events is not None:
            self._events.close()
        self._run = Run(self._opened, source, self._now, self._elapsed)
        events: Generator[EngineEvent] = self._run.events()
        self._events = events
        return events

    def close(self) -> None:
        """Ends vLLM and frees the device. Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.core.close()

    @property
    def added_s(self) -> float:
        """See the class."""
        return 0.0 if self._run is None else float(self._run.added_s)

    @property
    def beside_s(self) -> float:
        """See the class."""
        return 0.0 if self._run is None else float(self._run.beside_s)

    @property
    def num_steps(self) -> int:
        """See the class."""
        return 0 if self._run is None else int(self._run.num_steps)

    def _load(self) -> Any:
        options = self._options
        if options.policy not in POLICY_NAMES:
            raise ConfigurationError(
                f"There is no policy {options.policy!r}; choose one of {', '.join(POLICY_NAMES)}."
            )
        found = installed_vllm()
        reason = why_not_vllm(options.device, found)
        if reason is not None or found is None:
            raise ConfigurationError(f"The engine `vllm` cannot be used: {reason}")
        if options.is_on_cpu and not options.separate_core and "llvmlite" in sys.modules:
            # Putting its kernels for CPUs in place, vLLM asks every object of every module for a `__dict__`,
            # and numba's compiler has one that makes up whatever it is asked for.
            raise EngineStartError(
                "vLLM cannot start on a CPU in a process that has loaded numba; open the engine in an "
                "`EngineProcess`, or with `separate_core`."
            )
        set_environment(options)
        from blend_core.engines.vllm.core import Core, LocalCore, RemoteCore
        from blend_core.engines.vllm.run import OpenedVllm

        # Whatever ends this before its end, an interrupt too: vLLM's processes would go on.
        with ExitStack() as half_opened:
            remote: RemoteControl | None = None
            if options.separate_core:
                remote = RemoteControl(_ADMISSIONS_TOLD * options.max_num_seqs)
                half_opened.callback(remote.close)
            try:
                with nullcontext() if remote is None else remote.log.starting():
                    llm_engine, config = _start(options, remote)
            except Exception as error:
                raise _start_failed(error, remote) from error
            core: Core = LocalCore(llm_engine) if remote is None else RemoteCore(llm_engine, remote)
            half_opened.callback(core.close)
            if remote is not None:
                remote.accept()
            _load_adapters(llm_engine, options.lora_adapters)
            dtype = str(config.model_config.dtype).removeprefix("torch.")
            info = EngineInfo(
                engine=self.name,
                model=load_model_spec(Path(options.model_folder), dtype),
                device=options.device_profile,
                limits=core.control.limits(),
                details=_details(options, found.version, dtype, config),
            )
            half_opened.pop_all()
        return OpenedVllm(info, core, options, int(config.model_config.max_model_len))


def set_environment(options: VllmEngineOptions) -> None:
    """Sets the variables that vLLM reads when it is loaded. What the user has set stays.

    Raises:
        ConfigurationError: `CUDA_VISIBLE_DEVICES` does not list the device.
    """
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(options.separate_core)),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }
    if options.is_on_cpu and options.kv_capacity_bytes is None:
        defaults["VLLM_CPU_KVCACHE_SPACE"] = "1"
    if options.num_threads is not None:
        defaults["OMP_NUM_THREADS"] = str(options.num_threads)
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    device, _, indices = options.device.partition(":")
    if device == "cuda" and indices:
        # What this process sees is numbered from 0, whatever the numbers of the GPUs are.
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = seen.split(",") if seen else None
        try:
            chosen = [names[int(index)] if names else index for index in indices.split(",")]
        except (IndexError, ValueError):
            raise ConfigurationError(
                f"The device is {options.device} and CUDA_VISIBLE_DEVICES={seen}; devices are numbered from "
                "0 in the order in which that lists them."
            ) from None
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(chosen)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _start(options: VllmEngineOptions, remote: RemoteControl | None) -> tuple[Any, Any]:
    from vllm import EngineArgs, LLMEngine
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.executor import Executor

    from blend_core.engines.vllm.scheduler import scheduler_class

    arguments: dict[str, Any] = {
        "model": options.model_folder,
        "dtype": options.dtype,
        "block_size": options.block_size,
        "max_num_seqs": options.max_num_seqs,
        "max_num_batched_tokens": options.max_num_batched_tokens,
        "kv_cache_memory_bytes": options.kv_capacity_bytes,
        "seed": options.seed,
        "enable_lora": bool(options.lora_adapters),
        # Compiling takes minutes on a CPU, and saves little there.
        "enforce_eager": options.is_on_cpu,
        "max_model_len": AS_LONG_AS_FITS,
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "additional_config": {} if remote is None else {ADDRESS_KEY: remote.address},
        **options.vllm_options,
    }
    config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
    # Only now it is known whether vLLM schedules ahead with these options on this device.
    config.scheduler_config.scheduler_cls = scheduler_class(
        is_async=bool(config.scheduler_config.async_scheduling)
    )
    # vLLM's newer runner, which needs Triton, has no generators.
    if options.is_on_cpu and not config.use_v2_model_runner:
        config.parallel_config.worker_cls = _CPU_WORKER
    llm_engine = LLMEngine(
        vllm_config=config,
        executor_class=Executor.get_class(config),
        log_stats=False,
        multiprocess_mode=remote is not None,
    )
    return llm_engine, config


def _start_failed(error: Exception, remote: RemoteControl | None) -> EngineError:
    """What is told of an error of `_start`: a core of its own that ended and said nothing was killed."""
    if remote is None:
        return start_error(error)
    words = remote.log.words()
    if remote.log.is_kept and words is None and _CORE_FAILED in str(error):
        return EngineDiedError(
            "vLLM's engine core ended while it loaded and said nothing, as where the kernel ends a process "
            "because memory runs out."
        )
    return start_error(error, words)


def _load_adapters(llm_engine: Any, folders: Mapping[str, str]) -> None:
    """Has vLLM read each adapter once: of one that it cannot use it would die at each request that names it.

    Raises:
        EngineStartError: names the first that it cannot use.
    """
    from blend_core.engines.vllm.requests import lora_requests

    for name, adapter in lora_requests(folders).items():
        try:
            llm_engine.add_lora(adapter)
        except Exception as error:
            raise EngineStartError(
                f"vLLM cannot use the LoRA adapter {name!r} ({words_of(error)}); name one that was made for "
                "the job's model."
            ) from error


def _details(options: VllmEngineOptions, version: str, dtype: str, config: Any) -> dict[str, str]:
    parallel, scheduler = config.parallel_config, config.scheduler_config
    return {
        "vllm": version,
        "dtype": dtype,
        "device": options.device,
        "policy": options.policy,
        "max_model_len": str(config.model_config.max_model_len),
        "tensor_parallel_size": str(parallel.tensor_parallel_size),
        "pipeline_parallel_size": str(parallel.pipeline_parallel_size),
        "async_scheduling": str(bool(scheduler.async_scheduling)).lower(),
        "separate_core": str(options.separate_core).lower(),
        "quantization": str(config.model_config.quantization or "none"),
        "lora_adapters": ", ".join(options.lora_adapters) or "none",
        "seed": str(options.seed),
    }
