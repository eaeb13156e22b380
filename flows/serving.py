"""Which engine serves a job on this machine, and with how much KV in which blocks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blend_core.engines.vllm.adapter_folders import check_adapter_folders
from blend_core.engines.vllm.installed import installed_vllm, why_not_vllm
from blend_core.engines.vllm.model_fit import check_model_fit
from blend_core.engines.vllm.options import CPU_BLOCK_TOKENS
from blend_core.engines.vllm.passed_options import (
    AS_LONG_AS_FITS,
    check_closed_options,
    check_options_on_cpu,
)
from blend_core.errors import ConfigurationError
from blend_core.performance import num_kv_blocks
from blend_core.policies.base import EngineLimits
from blend_core.specs import DeviceProfile, ModelSpec, load_model_spec
from flows.job_parts import EngineName, JobOptions
from flows.settings import EngineSettings


@dataclass(frozen=True, slots=True)
class Serving:
    """An engine of this machine, chosen.

    Attributes:
        engine: `torch` or `vllm`.
        settings: of this machine's engines.
        vllm_options: vLLM's own options, the job's over the machine's; empty for torch.
    """

    engine: EngineName
    settings: EngineSettings
    vllm_options: Mapping[str, Any]

    @classmethod
    def of(cls, settings: EngineSettings, options: JobOptions) -> "Serving":
        """The engine that the job asks for, else the machine's settings, else vLLM where it suits.

        Raises:
            ConfigurationError: vLLM is asked for and cannot serve here, or not with its options, or those are
                given and it is not to serve.
        """
        serving = cls._chosen(settings, options, why_not_vllm(settings.device, installed_vllm()))
        serving._check_device()
        return serving

    @classmethod
    def to_plan(cls, settings: EngineSettings, options: JobOptions, *, is_device_here: bool) -> "Serving":
        """The engine that a dry run plans for; a job may be planned on another machine than runs it.

        As `of`, but for two refusals that it passes over: that no vLLM here can serve the device, where vLLM
        is asked for, by name or by options of its own; and, for a device that is not here, that of options
        which vLLM cannot take on this machine's CPU.

        Args:
            settings: of this machine's engines.
            options: of the job.
            is_device_here: whether it is planned for this machine's device.

        Raises:
            ConfigurationError: the job has options for vLLM, and its engine, or that of this machine's
                settings, is torch; one has a value that vLLM does not know; or vLLM cannot take them on this
                machine's device.
        """
        wanted = _wanted(settings, options)
        asks_for_vllm = wanted is EngineName.VLLM or bool(options.vllm)
        why_not = None if asks_for_vllm else why_not_vllm(settings.device, installed_vllm())
        serving = cls._chosen(settings, options, why_not)
        if is_device_here:
            serving._check_device()
        return serving

    @classmethod
    def _chosen(cls, settings: EngineSettings, options: JobOptions, why_not: str | None) -> "Serving":
        """The engine, where `why_not` says why vLLM cannot serve, None that it can."""
        wanted = _wanted(settings, options)
        if wanted is EngineName.VLLM and why_not is not None:
            raise ConfigurationError(f"The engine `vllm` cannot be used: {why_not}")
        if wanted is EngineName.TORCH or why_not is not None:
            if options.vllm:
                reason = why_not
                if wanted is EngineName.TORCH:
                    reason = "its engine is `torch`; leave them out, or ask for the engine `vllm`."
                raise ConfigurationError(f"The job has options for vLLM, which will not run it: {reason}")
            return cls(EngineName.TORCH, settings, {})
        check_closed_options(options.vllm)
        return cls(EngineName.VLLM, settings, {**settings.vllm, **options.vllm})

    @property
    def is_vllm(self) -> bool:
        """Whether it is vLLM."""
        return self.engine is EngineName.VLLM

    @property
    def block_size(self) -> int:
        """Tokens of a KV block."""
        size = self.settings.block_size
        if self.is_vllm and self._is_on_cpu:
            return -(-size // CPU_BLOCK_TOKENS) * CPU_BLOCK_TOKENS
        return size

    @property
    def kv_capacity_bytes(self) -> int | None:
        """Memory of the KV cache; None where vLLM finds out what is free when it has loaded the model."""
        if self.is_vllm:
            if "kv_cache_memory_bytes" in self.vllm_options:
                return int(self.vllm_options["kv_cache_memory_bytes"])
            if not self._is_on_cpu:
                return None
        return int(self.settings.kv_gib * (1 << 30))

    @property
    def kv_setting(self) -> str:
        """What to raise for a larger KV cache."""
        for option in ("num_gpu_blocks_override", "kv_cache_memory_bytes"):
            if option in self.vllm_options:
                return f"the vLLM option `{option}`"
        if self.kv_capacity_bytes is None:
            return "the KV of the device profile (BLEND_ENGINE__DEVICE_PROFILE)"
        return "BLEND_ENGINE__KV_GIB"

    @property
    def num_devices(self) -> int:
        """GPUs that a replica of the model is spread over."""
        if not self.is_vllm or self._is_on_cpu:
            return 1
        options = self.vllm_options
        return int(options.get("tensor_parallel_size", 1)) * int(options.get("pipeline_parallel_size", 1))

    @property
    def lora_adapters(self) -> Mapping[str, str]:
        """Folders of LoRA adapters by name."""
        adapters: Mapping[str, str] = self.vllm_options.get("lora_adapters", {})
        return adapters

    def check_options(self, folder: Path, name: str, *, is_any_length_taken: bool) -> None:
        """Checks options of vLLM's without vLLM, against the files of this machine; of torch nothing.

        Args:
            folder: of the model.
            name: the model's name to use in errors.
            is_any_length_taken: whether vLLM is told to take contexts that are longer than the model's.

        Raises:
            ConfigurationError: a LoRA adapter cannot be used, or an option does not fit the model.
        """
        check_adapter_folders(self.vllm_options)
        check_model_fit(self.vllm_options, folder, name, is_any_length_taken=is_any_length_taken)

    def model_spec(self, folder: Path, name: str) -> ModelSpec:
        """Sizes of a model in the element type that it is served in.

        Raises:
            ConfigurationError: the formulas do not cover the model.
        """
        return load_model_spec(folder, self._dtype(), name=name)

    def max_model_len(self, model: ModelSpec) -> int:
        """Longest prompt plus answer."""
        asked = int(self.vllm_options.get("max_model_len", AS_LONG_AS_FITS))
        return model.max_model_len if asked == AS_LONG_AS_FITS else min(asked, model.max_model_len)

    def limits(self, model: ModelSpec, device: DeviceProfile) -> EngineLimits:
        """What a plan must respect. KV that vLLM has yet to find is what the device's profile says.

        Raises:
            ConfigurationError: the KV cache has no room for a single block.
        """
        capacity = self.kv_capacity_bytes
        if capacity is None:
            capacity = int(device.kv_capacity_bytes) * self.num_devices
        num_blocks = num_kv_blocks(model, capacity, self.block_size)
        if "num_gpu_blocks_override" in self.vllm_options:
            # vLLM keeps one block as padding.
            num_blocks = self.vllm_options["num_gpu_blocks_override"] - 1
        if num_blocks < 1:
            raise ConfigurationError(
                f"The KV cache has no room for a block of {self.block_size} tokens of model {model.name}; "
                f"raise {self.kv_setting}."
            )
        return EngineLimits(
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_num_seqs=self.settings.max_num_seqs,
            max_num_batched_tokens=self.settings.max_num_batched_tokens,
        )

    def _check_device(self) -> None:
        if self.is_vllm and self._is_on_cpu:
            check_options_on_cpu(self.vllm_options)

    @property
    def _is_on_cpu(self) -> bool:
        return self.settings.device == "cpu"

    def _dtype(self) -> str:
        """What `auto` comes to: vLLM serves in half precision unless told otherwise."""
        dtype = str(self.vllm_options.get("dtype", self.settings.dtype))
        if dtype != "auto":
            return dtype
        if self.is_vllm:
            return "bfloat16"
        # Only here: a process that plans for an explicit dtype needs no torch.
        import torch

        from blend_core.engines.torch.linear import native_dtype

        return str(native_dtype(torch.device(self.settings.device))).removeprefix("torch.")


def _wanted(settings: EngineSettings, options: JobOptions) -> EngineName:
    """The engine that the job asks for, else the machine's settings, which may leave it open."""
    return EngineName(settings.name) if options.engine is EngineName.AUTO else options.engine
