from pathlib import Path

import numpy as np
import pytest

from blend_core.engines.base import EngineEvent, RequestFinished
from blend_core.engines.torch.detokenizer import Detokenizer
from blend_core.engines.torch.engine import TorchEngine
from blend_core.errors import EngineError, RequestErrorCode
from blend_core.request import SamplingParams
from tests.unit.engines_torch.runs import (
    GREEDY,
    ListSource,
    options,
    plan_over,
    random_requests,
    request,
    run,
)


def test_equal_prompts_share_all_whole_blocks_but_compute_a_token(tiny_llama: Path) -> None:
    prompt = range(3, 3 + 64)
    outcome = run(tiny_llama, [request(seq, prompt) for seq in range(3)], max_num_seqs=1)

    assert [outcome.finished[seq].num_cached_tokens for seq in range(3)] == [0, 48, 48]
    assert len(set(outcome.tokens.values())) == 1


def test_requests_of_one_step_share_what_that_step_computes(tiny_llama: Path) -> None:
    prompt = range(3, 3 + 40)
    outcome = run(tiny_llama, [request(0, prompt), request(1, prompt)])

    assert outcome.finished[1].num_cached_tokens == 32
    assert outcome.tokens[0] == outcome.tokens[1]


@pytest.mark.parametrize("policy", ["fcfs", "dfs", "random", "dual_scan"])
def test_every_policy_gives_every_request_the_same_answer(tiny_llama: Path, policy: str) -> None:
    requests = random_requests(20)
    plain = run(tiny_llama, requests)

    outcome = run(tiny_llama, ListSource(requests, policy=policy), policy=policy)

    assert outcome.tokens == plain.tokens
    assert not outcome.failed


def test_a_preempted_request_keeps_its_answer(tiny_llama: Path) -> None:
    rng = np.random.default_rng(1)
    sampling = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    requests = [request(seq, rng.integers(3, 1024, 30), sampling) for seq in range(8)]

    undisturbed = run(tiny_llama, requests)
    disturbed = run(tiny_llama, requests, num_blocks=24)

    assert undisturbed.total("num_preempted") == 0
    assert disturbed.total("num_preempted") > 0
    assert disturbed.total("num_recomputed_tokens") > 0
    assert disturbed.tokens == undisturbed.tokens


def test_preemption_does_not_disturb_the_counts(tiny_llama: Path) -> None:
    sampling = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
    rng = np.random.default_rng(2)
    requests = [request(seq, rng.integers(3, 1024, 50), sampling) for seq in range(6)]

    outcome = run(tiny_llama, requests, num_blocks=20)

    computed = outcome.total("num_prefill_tokens") - outcome.total("num_recomputed_tokens")
    assert computed + outcome.total("num_cached_tokens") == 6 * 50
    assert outcome.total("num_decode_tokens") == 6 * 99
    assert outcome.total("num_finished") == 6


def test_a_sampled_answer_depends_on_its_seed_and_not_on_its_neighbours(tiny_llama: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    prompt = range(3, 40)
    alone = run(tiny_llama, [request(99, prompt, sampling)])

    others = random_requests(10, sampling=SamplingParams(max_tokens=20, temperature=1.0))
    among = run(tiny_llama, [*others, request(99, prompt, sampling)])
    other_seed = run(
        tiny_llama, [request(99, prompt, SamplingParams(20, temperature=1.0, top_p=0.9, seed=8))]
    )

    assert among.tokens[99] == alone.tokens[99]
    assert other_seed.tokens[99] != alone.tokens[99]


def test_requests_without_a_seed_differ_but_the_run_repeats(tiny_llama: Path) -> None:
    sampling = SamplingParams(max_tokens=20, temperature=1.0, ignore_eos=True)
    requests = [request(seq, range(3, 30), sampling) for seq in range(2)]
    first, again = run(tiny_llama, requests), run(tiny_llama, requests)
    reseeded = run(tiny_llama, requests, seed=1)

    assert first.tokens[0] != first.tokens[1]
    assert first.tokens == again.tokens
    assert first.tokens != reseeded.tokens


def test_an_end_of_sequence_token_stops_unless_it_is_ignored_or_early(tiny_llama: Path) -> None:
    # Hot sampling reaches the end token among 1,024 within a few thousand tokens for some seed.
    hot = [SamplingParams(max_tokens=400, temperature=5.0, seed=seed) for seed in range(20)]
    free = run(tiny_llama, [request(seq, range(3, 9), one) for seq, one in enumerate(hot)])
    stopped = [event for event in free.finished.values() if event.finish_reason == "stop"]
    assert stopped
    assert all(event.output_token_ids[-1] == 2 for event in stopped)
    assert all(2 not in event.output_token_ids[:-1] for event in free.finished.values())

    seed = min(stopped, key=lambda event: event.num_output_tokens).seq
    ignoring = SamplingParams(max_tokens=400, temperature=5.0, seed=seed, ignore_eos=True)
    late = SamplingParams(max_tokens=400, min_tokens=400, temperature=5.0, seed=seed)
    outcome = run(tiny_llama, [request(0, range(3, 9), ignoring), request(1, range(3, 9), late)])
    assert [outcome.finished[seq].num_output_tokens for seq in (0, 1)] == [400, 400]
    assert 2 in outcome.tokens[0]
    assert 2 not in outcome.tokens[1]


def test_a_stop_string_is_cut_off(tiny_llama: Path) -> None:
    plain = run(tiny_llama, [request(0, range(50, 90))]).finished[0]
    middle = len(plain.output_text) // 2
    stop = plain.output_text[middle : middle + 3]
    sampling = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, stop=("never there", stop))

    event = run(tiny_llama, [request(0, range(50, 90), sampling)]).finished[0]

    assert event.finish_reason == "stop"
    assert event.output_text == plain.output_text[: plain.output_text.index(stop)]
    assert event.output_token_ids == plain.output_token_ids[: event.num_output_tokens]


def test_finish_reason_is_length_at_max_tokens_and_at_the_models_last_position(tiny_llama: Path) -> None:
    requests = [request(0, range(3, 13)), request(1, range(3, 93))]
    outcome = run(tiny_llama, requests, max_model_len=100)

    assert [outcome.finished[seq].finish_reason for seq in (0, 1)] == ["length", "length"]
    assert [outcome.finished[seq].num_output_tokens for seq in (0, 1)] == [16, 10]


def test_requests_that_cannot_run_fail_by_name_and_the_others_go_on(tiny_llama: Path) -> None:
    requests = [
        request(0, [5, 1024]),
        request(1, [5, -1]),
        request(2, range(3, 3 + 200)),
        request(3, range(3, 3 + 100)),
        request(4, range(3, 10)),
        request(5, []),
    ]
    outcome = run(tiny_llama, requests, num_blocks=7, max_model_len=150)

    assert {seq: event.code for seq, event in outcome.failed.items()} == {
        0: RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
        1: RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
        2: RequestErrorCode.PROMPT_TOO_LONG,
        3: RequestErrorCode.REQUEST_TOO_LARGE,
        5: RequestErrorCode.EMPTY_PROMPT,
    }
    assert list(outcome.finished) == [4]


def test_any_number_of_requests_that_cannot_run_is_passed_over(tiny_llama: Path) -> None:
    requests = [*(request(seq, []) for seq in range(40)), request(40, range(3, 9))]
    outcome = run(tiny_llama, requests, max_num_seqs=2)

    assert len(outcome.failed) == 40
    assert list(outcome.finished) == [40]


def test_a_request_that_just_fits_the_cache_runs(tiny_llama: Path) -> None:
    outcome = run(tiny_llama, [request(0, range(3, 3 + 97))], num_blocks=7)

    assert outcome.finished[0].num_output_tokens == 16


def test_an_answer_that_cannot_be_decoded_fails_alone(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(tiny_llama, [request(0, range(3, 20)), request(1, range(30, 60))])
    poison = plain.tokens[0]
    decode = Detokenizer.decode

    def break_on_poison(self: Detokenizer, token_ids: list[int]) -> str:
        if tuple(token_ids) == poison:
            raise ValueError("a token without text")
        return decode(self, token_ids)

    monkeypatch.setattr(Detokenizer, "decode", break_on_poison)
    outcome = run(tiny_llama, [request(0, range(3, 20)), request(1, range(30, 60))])

    assert outcome.failed[0].code is RequestErrorCode.ENGINE_FAILED
    assert "a token without text" not in outcome.failed[0].message
    assert outcome.tokens == {1: plain.tokens[1]}


def test_withdrawn_requests_leave_without_an_event(tiny_llama: Path) -> None:
    sampling = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    requests = [request(0, range(3, 9)), *(request(seq, range(3, 9), sampling) for seq in range(1, 30))]
    source = ListSource(requests)

    def withdraw_when_the_first_is_done(event: EngineEvent) -> None:
        if isinstance(event, RequestFinished) and event.seq == 0:
            source.withdrawals = [0, 1, 29]  # ended, in flight, waiting

    outcome = run(tiny_llama, source, withdraw_when_the_first_is_done)

    assert set(outcome.finished) == set(range(30)) - {1, 29}


def test_a_revision_takes_over_between_steps(tiny_llama: Path) -> None:
    requests = [request(seq, range(3, 20 + seq)) for seq in range(12)]
    source = ListSource(requests)

    def revise_after_the_first(event: EngineEvent) -> None:
        if isinstance(event, RequestFinished) and not source.revisions and event.revision == 0:
            waiting = [one for one in reversed(requests) if one.seq > 3]
            source.revisions = [plan_over(waiting, revision=1)]

    first = True

    def once(event: EngineEvent) -> None:
        nonlocal first
        if first and isinstance(event, RequestFinished):
            first = False
            revise_after_the_first(event)

    outcome = run(tiny_llama, source, once, max_num_seqs=1)

    assert list(outcome.finished) == [0, 11, 10, 9, 8, 7, 6, 5, 4, 1, 2, 3]
    assert [outcome.finished[seq].revision for seq in (0, 11, 3)] == [0, 1, 1]
    assert {window.revision for window in outcome.windows} == {0, 1}


def test_requests_are_fetched_a_window_at_a_time(tiny_llama: Path) -> None:
    source = ListSource([request(seq, range(3, 9)) for seq in range(100)])
    most = 0

    def look(event: EngineEvent) -> None:
        nonlocal most
        if isinstance(event, RequestFinished):
            most = max(most, source.num_fetched - event.seq)

    outcome = run(tiny_llama, source, look, max_num_seqs=2)

    assert len(outcome.finished) == 100
    assert most <= 16


def test_windows_add_up(tiny_llama: Path) -> None:
    requests = random_requests(20)
    outcome = run(tiny_llama, requests)

    prompts = sum(one.num_prompt_tokens for one in requests)
    assert outcome.total("num_prefill_tokens") + outcome.total("num_cached_tokens") == prompts
    assert outcome.total("num_decode_tokens") == 20 * 15
    assert outcome.total("num_finished") == 20
    assert [window.batch_index for window in outcome.windows] == list(range(len(outcome.windows)))
    assert all(0 < window.kv_usage <= 1 for window in outcome.windows)
    assert all(window.num_running_left <= 8 for window in outcome.windows)


def test_an_engine_runs_one_source_after_another(tiny_llama: Path) -> None:
    engine = TorchEngine(options(tiny_llama))
    info = engine.open()
    assert info.limits.num_blocks == 600
    assert info.model.vocab_size == 1024

    for _ in range(2):
        events = list(engine.run(ListSource([request(0, range(3, 9))])))
        assert sum(isinstance(event, RequestFinished) for event in events) == 1
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match="open"):
        engine.run(ListSource([request(0, range(3, 9), GREEDY)]))
