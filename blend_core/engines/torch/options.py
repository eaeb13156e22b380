"""Options of the torch engine. No torch here: whoever wires an engine up needs not load it."""

from dataclasses import dataclass

from blend_core.engines.option_checks import check_step_options
from blend_core.errors import ConfigurationError
from blend_core.specs import DeviceProfile

_DTYPES = ("auto", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class TorchEngineOptions:
    """What a torch engine is opened with. Picklable, so that it can cross to an engine process.

    Attributes:
        model_folder: Hugging Face folder with `config.json`, safetensors and `tokenizer.json`.
        policy: name of the admission policy.
        device_profile: what windows are reckoned with; its KV capacity applies where no other is given.
        dtype: `bfloat16`, `float32`, or `auto` for bfloat16 where the device multiplies it natively.
        device: torch device, such as `cpu` or `cuda:0`.
        block_size: tokens of a KV block.
        kv_capacity_bytes: memory of the KV cache, rounded down to whole blocks.
        num_blocks: KV blocks; given instead of `kv_capacity_bytes`.
        max_num_seqs: requests in flight at most.
        max_num_batched_tokens: prompt and decode tokens of one step at most.
        max_model_len: longest prompt plus answer, at most the model's; None takes the model's.
        num_threads: CPU threads of torch; None leaves torch's own choice.
        seed: of the generator behind requests that bring no seed.
        request_timeout_s: seconds from a request's first step in which it must end; None without end.
    """

    model_folder: str
    policy: str
    device_profile: DeviceProfile
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    kv_capacity_bytes: int | None = None
    num_blocks: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    num_threads: int | None = None
    seed: int = 0
    request_timeout_s: float | None = None

    def __post_init__(self) -> None:
        """Raises `ConfigurationError` naming the option that makes no sense."""
        if self.dtype not in _DTYPES:
            raise ConfigurationError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(_DTYPES)}.")
        if self.kv_capacity_bytes is not None and self.num_blocks is not None:
            raise ConfigurationError("Give either kv_capacity_bytes or num_blocks, not both.")
        check_step_options(
            self,
            (
                "block_size",
                "kv_capacity_bytes",
                "num_blocks",
                "max_num_seqs",
                "max_num_batched_tokens",
                "max_model_len",
                "num_threads",
            ),
        )
