"""The torch engine: opens a model once, runs sources on it."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from blend_core.engines.base import EngineEvent, EngineInfo, RequestSource
from blend_core.engines.torch.detokenizer import Detokenizer
from blend_core.engines.torch.executor import SequentialExecutor
from blend_core.engines.torch.kv_cache import LayerCache, block_bytes
from blend_core.engines.torch.linear import native_dtype
from blend_core.engines.torch.model_config import load_model_config
from blend_core.engines.torch.operators import build_operators
from blend_core.engines.torch.options import TorchEngineOptions
from blend_core.engines.torch.rotary import RotaryTable
from blend_core.engines.torch.run import Clocks, LoadedModel, Run
from blend_core.engines.torch.sequence import AnswerRules
from blend_core.engines.torch.weights import load_weights
from blend_core.errors import ConfigurationError, EngineError, EngineStartError
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import POLICY_NAMES
from blend_core.specs import load_model_spec


class TorchEngine:
    """An `Engine` in this process. One run at a time."""

    name = "torch"

    def __init__(
        self,
        options: TorchEngineOptions,
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
        self._clocks = Clocks(now, elapsed)
        self._model: LoadedModel | None = None
        self._last_run: Run | None = None

    def open(self) -> EngineInfo:
        """Loads weights and makes the KV cache; a second call returns the same facts.

        Raises:
            ConfigurationError: the model or an option cannot be served; the message names it.
            EngineStartError: the device is missing or its memory does not suffice.
        """
        if self._model is None:
            self._model = self._load()
        return self._model.info

    def run(self, source: RequestSource) -> Iterator[EngineEvent]:
        """Runs everything in the source; see `Engine.run`."""
        if self._model is None:
            raise EngineError("The engine is not open; call open() before run().")
        self._last_run = Run(self._model, source, self._clocks)
        return self._last_run.events()

    def close(self) -> None:
        """Frees weights and KV."""
        self._model = None
        self._last_run = None

    @property
    def num_referenced_blocks(self) -> int:
        """KV blocks that requests of the latest run refer to; 0 once it is through."""
        if self._last_run is None or self._model is None:
            return 0
        return self._model.info.limits.num_blocks - self._last_run.scheduler.num_free_blocks

    def check_integrity(self) -> None:
        """Raises `AssertionError` where the block accounting of the latest run does not add up."""
        if self._last_run is not None:
            self._last_run.scheduler.check_integrity()

    def _load(self) -> LoadedModel:
        options = self._options
        folder = Path(options.model_folder)
        config = load_model_config(folder)
        if options.policy not in POLICY_NAMES:
            raise ConfigurationError(
                f"There is no policy {options.policy!r}; choose one of {', '.join(POLICY_NAMES)}."
            )
        if options.num_threads is not None:
            torch.set_num_threads(options.num_threads)
        try:
            device = torch.device(options.device)
            torch.zeros(1, device=device)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise EngineStartError(
                f"Device {options.device!r} cannot be used ({reason}); try 'cpu'."
            ) from None
        dtype = native_dtype(device) if options.dtype == "auto" else getattr(torch, options.dtype)
        max_model_len = min(options.max_model_len or config.max_model_len, config.max_model_len)
        num_blocks = self._num_blocks(block_bytes(config, options.block_size, dtype))
        try:
            weights = load_weights(folder, config, device, dtype)
            shape = (config.num_kv_heads, num_blocks, options.block_size, config.head_size)
            caches = [LayerCache(shape, device, dtype) for _ in range(config.num_layers)]
        except (RuntimeError, MemoryError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EngineStartError(
                f"The model and {num_blocks} KV blocks do not fit on {options.device} ({reason}); "
                "lower kv_capacity_bytes or take a smaller model."
            ) from None
        rotary = RotaryTable(config.rope, config.head_size, max_model_len, device, dtype)
        executor = SequentialExecutor(build_operators(weights, config, rotary, caches))
        dtype_name = str(dtype).removeprefix("torch.")
        info = EngineInfo(
            engine=self.name,
            model=load_model_spec(folder, dtype_name),
            device=options.device_profile,
            limits=EngineLimits(
                options.block_size, num_blocks, options.max_num_seqs, options.max_num_batched_tokens
            ),
            details={
                "torch": torch.__version__,
                "architecture": config.architecture,
                "dtype": dtype_name,
                "device": str(device),
                "num_threads": str(torch.get_num_threads()),
                "executor": executor.name,
                "packed_weights": str(weights.packed).lower(),
                "policy": options.policy,
                "max_model_len": str(max_model_len),
                "seed": str(options.seed),
            },
        )
        eos_token_ids = frozenset(token for token in config.eos_token_ids if 0 <= token < config.vocab_size)
        rules = AnswerRules(max_model_len, eos_token_ids, options.seed, Detokenizer(folder))
        return LoadedModel(info, rules, executor, device, dtype, options.policy, options.request_timeout_s)

    def _num_blocks(self, bytes_per_block: int) -> int:
        options = self._options
        if options.num_blocks is not None:
            return options.num_blocks
        capacity = options.kv_capacity_bytes
        if capacity is None:
            capacity = int(options.device_profile.kv_capacity_bytes)
        if capacity < bytes_per_block:
            raise ConfigurationError(
                f"A KV cache of {capacity} bytes holds no block of {bytes_per_block} bytes; "
                "raise kv_capacity_bytes."
            )
        return capacity // bytes_per_block
