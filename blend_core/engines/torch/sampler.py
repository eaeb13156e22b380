"""From logits to tokens. A draw depends on the request's seed and position alone, never on its neighbours."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blend_core.request import SamplingParams

_GREEDY_BELOW = 1e-5
# Candidates that are sorted for top-p; a row whose nucleus is larger is sorted whole.
_NUM_CANDIDATES = 512


@dataclass(frozen=True, slots=True)
class SampledRow:
    """How one row of logits is sampled.

    Attributes:
        sampling: the request's parameters.
        seed: the request's own, or the one derived for it.
        position: output tokens that the request has so far.
        banned_token_ids: tokens that may not come now (ends of sequence before `min_tokens`).
    """

    sampling: SamplingParams
    seed: int
    position: int
    banned_token_ids: frozenset[int] = frozenset()


def derived_seed(run_seed: int, seq: int) -> int:
    """Seed of a request that brings none."""
    return _hash64(run_seed, seq)


def sample(logits: Tensor, rows: Sequence[SampledRow]) -> list[int | None]:
    """Draws one token per row, None where a row's logits are no numbers. May overwrite `logits`.

    Args:
        logits: `(num_rows, vocab)` float32.
        rows: how each row is sampled.
    """
    with torch.inference_mode():
        for index, row in enumerate(rows):
            if row.banned_token_ids:
                logits[index, list(row.banned_token_ids)] = float("-inf")
        best, best_ids = logits.max(dim=-1)
        sound = torch.isfinite(best).tolist()
        tokens: list[int | None] = best_ids.tolist()
        drawn = [index for index, row in enumerate(rows) if sound[index] and not _is_greedy(row.sampling)]
        if drawn:
            random_logits = logits if len(drawn) == len(rows) else logits[drawn]
            for index, token in zip(drawn, _draw(random_logits, [rows[i] for i in drawn]), strict=True):
                tokens[index] = token
    return [token if ok else None for token, ok in zip(tokens, sound, strict=True)]


def _is_greedy(sampling: SamplingParams) -> bool:
    """Whether the best token is the answer; of equal ones it is the first, where a draw would take any."""
    return sampling.temperature < _GREEDY_BELOW or sampling.top_k == 1


def _draw(logits: Tensor, rows: Sequence[SampledRow]) -> list[int]:
    """Inverse of the cumulative distribution in vocabulary order, at a number made from seed and position."""
    device = logits.device
    temperature = torch.tensor([row.sampling.temperature for row in rows], device=device)
    logits = logits / temperature.unsqueeze(1)
    filtered = [
        index
        for index, row in enumerate(rows)
        if row.sampling.top_p < 1 or 0 < row.sampling.top_k < logits.shape[1]
    ]
    if filtered:
        thresholds = _thresholds(logits[filtered], [rows[index].sampling for index in filtered])
        kept = logits[filtered]
        logits[filtered] = kept.masked_fill_(kept < thresholds.unsqueeze(1), float("-inf"))
    # Accumulated in float64: in float32 a tail token's share could vanish in the sum.
    cumulative = torch.softmax(logits, dim=-1).cumsum(dim=-1, dtype=torch.float64)
    uniform = [_hash64(row.seed, row.position) / 2**64 for row in rows]
    target = torch.tensor(uniform, dtype=torch.float64, device=device) * cumulative[:, -1]
    # A draw that rounds up to the whole sum would fall behind the last token.
    target = torch.minimum(target, torch.nextafter(cumulative[:, -1], torch.zeros_like(target)))
    tokens: list[int] = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).squeeze(1).tolist()
    return tokens


def _thresholds(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """`(num_rows,)` smallest logit that survives top-k, then top-p of the rest; equal ones survive too."""
    vocab_size = logits.shape[1]
    top_k = [param.top_k if 0 < param.top_k < vocab_size else vocab_size for param in params]
    num_candidates = max(_NUM_CANDIDATES, *(k for k in top_k if k < vocab_size), 0)
    best = torch.topk(logits, min(vocab_size, num_candidates), dim=-1).values
    thresholds = torch.full((len(params),), float("-inf"), device=logits.device)
    for index, (param, k) in enumerate(zip(params, top_k, strict=True)):
        candidates = best[index, :k]
        if param.top_p < 1:
            total = torch.logsumexp(candidates if k < vocab_size else logits[index], dim=0)
            mass = torch.exp(candidates - total).cumsum(dim=0)
            if k == vocab_size and mass[-1] < param.top_p:
                candidates = logits[index].sort(descending=True).values
                mass = torch.exp(candidates - total).cumsum(dim=0)
            last = min(int(torch.searchsorted(mass, param.top_p)), len(candidates) - 1)
            thresholds[index] = candidates[last]
        else:
            thresholds[index] = candidates[-1]
    return thresholds


def _hash64(*numbers: int) -> int:
    packed = struct.pack(f"<{len(numbers)}q", *(_signed64(number) for number in numbers))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def _signed64(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
