"""A bound that no run can beat, whatever its order.

`practical_optimum_s` of the performance model is the yardstick of published figures: it counts `d` decode
passes where the prefill's last pass yields the first token, so a run of very few requests may come in under
it. This bound is exact instead, so that a simulated run can be checked against it.
"""

import numpy as np

from blend_core.performance import MAX_NUM_BATCHED_TOKENS, StepTimeModel, TokenCounts
from blend_core.specs import DeviceProfile, ModelSpec


def least_duration_s(
    model: ModelSpec,
    device: DeviceProfile,
    num_prompt_tokens: TokenCounts,
    num_shared_tokens: TokenCounts,
    num_output_tokens: TokenCounts,
    *,
    block_size: int,
    kv_capacity_tokens: float,
    max_num_batched_tokens: int = MAX_NUM_BATCHED_TOKENS,
    overlap: bool = True,
) -> float:
    """Returns seconds that any run of the requests takes at least, under the model's own step times.

    With `S` steps of `N` tokens in all, GEMM takes at least `fixed S + per_token N` and `S` weight reads.
    Both grow with `S`, and the time of a step is convex in its parts (interference is at most 1), so the sums
    of the parts bound the sum of the times. `S` is at least `N / max_num_batched_tokens`, the longest answer,
    and the KV that all answers hold over their steps by the capacity, where every shared block counts for
    one request only.

    Preemption is outside the bound: what a preempted request held is computed anew, and that pass stands for
    one that would have read it.

    Args:
        model: sizes of the model.
        device: abilities of the device.
        num_prompt_tokens: `(num_requests,)` `p`.
        num_shared_tokens: `(num_requests,)` of each prompt what the prompt before it in depth-first order has
            too, as `PrefixTree.num_shared_tokens` gives it.
        num_output_tokens: `(num_requests,)` true `d`, at least 1.
        block_size: tokens of a KV block.
        kv_capacity_tokens: tokens of KV that fit.
        max_num_batched_tokens: tokens of one step at most.
        overlap: whether decode attention runs beside compute.
    """
    prompt = np.asarray(num_prompt_tokens, dtype=np.float64)
    if prompt.size == 0:
        return 0.0
    shared = np.asarray(num_shared_tokens, dtype=np.float64)
    output = np.asarray(num_output_tokens, dtype=np.float64)
    unshared = prompt - shared
    # The last block of a prompt that others have too is computed by each of them, but held once.
    held = np.where(unshared > block_size, unshared, 0.0)
    growth = output * (output - 1.0) / 2.0
    num_tokens = float(unshared.sum() + (output - 1.0).sum())
    num_steps = max(
        float((held * output + growth).sum()) / kv_capacity_tokens,
        num_tokens / max_num_batched_tokens,
        float(output.max()),
    )
    times = StepTimeModel.of(model, device)
    gemm_s = max(
        times.gemm_fixed_s * num_steps + times.gemm_s_per_token * num_tokens, times.weight_read_s * num_steps
    )
    prefill_s = times.prefill_s_per_token_sq * float((prompt * prompt - shared * shared).sum())
    decode_s = times.decode_s_per_kv_token * float((prompt * (output - 1.0) + growth).sum())
    return times.combined_s(gemm_s + prefill_s, decode_s, overlap=overlap)
