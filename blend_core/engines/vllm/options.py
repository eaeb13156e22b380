"""Options of the vLLM engine. No vLLM here: whoever wires an engine up needs not load it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blend_core.engines.option_checks import check_step_options
from blend_core.engines.vllm.passed_options import OWN_OPTIONS, check_options_on_cpu, check_passed_options
from blend_core.errors import ConfigurationError
from blend_core.specs import DeviceProfile

CPU_BLOCK_TOKENS = 32
"""vLLM's kernels for CPUs want blocks of a multiple of so many tokens."""


@dataclass(frozen=True, slots=True)
class VllmEngineOptions:
    """What a vLLM engine is opened with. Picklable, so that it can cross to an engine process.

    Attributes:
        model_folder: Hugging Face folder.
        policy: name of the admission policy.
        device_profile: what windows are reckoned with.
        device: `cpu`, `cuda` or `cuda:1`; with several GPUs vLLM takes as many as its options say.
        dtype: as vLLM names it; `auto` is the model's own.
        block_size: tokens of a KV block.
        kv_capacity_bytes: memory of the KV cache; None leaves it to `gpu_memory_utilization`.
        max_num_seqs: requests in flight at most.
        max_num_batched_tokens: prompt and decode tokens of one step at most.
        num_threads: CPU threads; None leaves vLLM's own choice.
        seed: of the generator behind requests that bring no seed.
        request_timeout_s: seconds from a request's first step in which it must end; None without end.
        passed: options of vLLM's own and those of `passed_options.OWN_OPTIONS`, by name.
    """

    model_folder: str
    policy: str
    device_profile: DeviceProfile
    device: str = "cpu"
    dtype: str = "auto"
    block_size: int = 32
    kv_capacity_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048
    num_threads: int | None = None
    seed: int = 0
    request_timeout_s: float | None = None
    passed: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` naming the option that makes no sense."""
        check_step_options(
            self,
            (
                "block_size",
                "kv_capacity_bytes",
                "max_num_seqs",
                "max_num_batched_tokens",
                "num_threads",
            ),
        )
        check_passed_options(self.passed)
        if self.is_on_cpu:
            check_options_on_cpu(self.passed)
        if self.is_on_cpu and self.block_size % CPU_BLOCK_TOKENS:
            raise ConfigurationError(
                f"block_size is {self.block_size}; vLLM on a CPU wants a multiple of {CPU_BLOCK_TOKENS}."
            )

    @property
    def is_on_cpu(self) -> bool:
        """Whether the device is a CPU."""
        return self.device == "cpu"

    @property
    def separate_core(self) -> bool:
        """Whether vLLM's core runs in a process of its own, beside that which reads and writes its texts."""
        return bool(self.passed.get("separate_core", True))

    @property
    def lora_adapters(self) -> Mapping[str, str]:
        """Folders of LoRA adapters by name."""
        adapters: Mapping[str, str] = self.passed.get("lora_adapters", {})
        return adapters

    @property
    def vllm_options(self) -> dict[str, Any]:
        """The options that are vLLM's own."""
        return {name: value for name, value in self.passed.items() if name not in OWN_OPTIONS}
