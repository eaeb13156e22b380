"""The reference implementation on the same folder, and when a greedy token counts as the same."""

from pathlib import Path

import torch

from blend_core.request import Request

CLOSE = 1e-4


class Reference:
    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.inference_mode()
    def check(self, request: Request, tokens: tuple[int, ...]) -> None:
        """Every token is the reference's best one after the same tokens, or its best two are nearly equal."""
        prompt = request.prompt_token_ids.tolist()
        logits = self._model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
        best = logits.topk(2)
        assert len(tokens) == request.sampling.max_tokens
        for token, expected, values in zip(tokens, best.indices[:, 0].tolist(), best.values, strict=True):
            assert token == expected or values[0] - values[1] < CLOSE
