"""Small jobs for the planner's tests."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from blend_core.request import RequestArrays
from blend_core.specs import DeviceProfile, ModelSpec, load_device_profile, model_spec_preset

MakeRequests = Callable[..., RequestArrays]


@pytest.fixture
def make_requests() -> MakeRequests:
    """Builds request arrays from token lists; outputs are preset to 10 tokens unless told."""

    def make(
        prompts: Sequence[Sequence[int]],
        max_tokens: int | Sequence[int] = 10,
        min_tokens: int | Sequence[int] | None = None,
        seq: Sequence[int] | None = None,
    ) -> RequestArrays:
        n = len(prompts)
        upper = np.broadcast_to(np.asarray(max_tokens, dtype=np.int32), (n,)).copy()
        lower = upper if min_tokens is None else np.broadcast_to(np.asarray(min_tokens, dtype=np.int32), (n,))
        offsets = np.zeros(n + 1, dtype=np.int64)
        np.cumsum([len(prompt) for prompt in prompts], out=offsets[1:])
        return RequestArrays(
            seq=np.arange(n, dtype=np.int64) if seq is None else np.asarray(seq, dtype=np.int64),
            token_ids=np.array([token for prompt in prompts for token in prompt], dtype=np.int32),
            offsets=offsets,
            min_tokens=lower.copy(),
            max_tokens=upper,
        )

    return make


@pytest.fixture
def llama_8b() -> ModelSpec:
    return model_spec_preset("llama-3.1-8b")


@pytest.fixture
def a100() -> DeviceProfile:
    return load_device_profile("a100-80g")
