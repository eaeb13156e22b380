"""Numbers that are none stay with the request that made them."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from blend_core.errors import RequestErrorCode
from blend_core.request import Request
from tests.tiny_llama import make_tiny_llama
from tests.unit.engines_torch.runs import Outcome, request, run

POISON = 900
"""A token whose embedding is no number: everything after it is none either."""


@pytest.fixture(scope="module")
def poisonous_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_llama(tmp_path_factory.mktemp("models") / "poisonous")
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})
    return folder


def alone(folder: Path, requests: list[Request]) -> dict[int, tuple[int, ...]]:
    """Answers of requests that meet no other one."""
    return {one.seq: run(folder, [one]).tokens[one.seq] for one in requests}


def check(outcome: Outcome, sound: dict[int, tuple[int, ...]]) -> None:
    assert {event.code for event in outcome.failed.values()} == {RequestErrorCode.ENGINE_FAILED}
    assert outcome.tokens == sound


def test_later_requests_in_the_same_blocks_are_sound(poisonous_llama: Path) -> None:
    others = [request(seq, range(3, 10 + 5 * seq)) for seq in range(1, 8)]
    poisoned = request(0, [POISON] * 90)

    outcome = run(poisonous_llama, [poisoned, *others], max_num_seqs=1, num_blocks=7)

    check(outcome, alone(poisonous_llama, others))


def test_requests_beside_it_are_sound(poisonous_llama: Path) -> None:
    """Its prompt takes many steps while others of different lengths decode."""
    others = [request(seq, range(3, 10 + 5 * seq)) for seq in range(1, 7)]
    poisoned = request(0, [POISON] * 600)

    outcome = run(poisonous_llama, [poisoned, *others], max_num_batched_tokens=64)

    check(outcome, alone(poisonous_llama, others))


def test_what_it_computed_is_not_reused(poisonous_llama: Path) -> None:
    shared = range(3, 3 + 64)
    requests = [request(0, [*shared, POISON]), request(1, [*shared, 5]), request(2, [*shared, 6])]

    outcome = run(poisonous_llama, requests, max_num_seqs=1)

    check(outcome, alone(poisonous_llama, requests[1:]))
    assert [outcome.finished[seq].num_cached_tokens for seq in (1, 2)] == [0, 64]
