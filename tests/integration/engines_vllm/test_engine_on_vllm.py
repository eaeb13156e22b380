"""Events of runs on vLLM: admissions, windows, withdrawals, revisions, bad requests."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "contract"))

from checked_policy import CheckedPolicy

from blend_core.engines.base import EngineEvent, RequestFinished, RequestsAdmitted
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.errors import ConfigurationError, PlanError, RequestErrorCode
from blend_core.plan import Plan
from blend_core.policies.base import EngineLimits
from blend_core.policies.factory import POLICY_NAMES, make_policy
from blend_core.request import Request, SamplingParams
from tests.integration.engines_vllm.vllm_runs import (
    BLOCK_SIZE,
    Block32Source,
    options,
    run_on,
    run_with_policy,
)
from tests.unit.engines_torch.runs import ListSource, plan_over, random_requests, request

LONG = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
SHORT = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
MANY = 20_000


def checked_policy(name: str, plan: Plan, limits: EngineLimits) -> CheckedPolicy:
    """The named policy, checked at every call that vLLM's scheduler makes."""
    return CheckedPolicy(make_policy(name, plan, limits), plan, limits)


def assert_nothing_is_left(engine: VllmEngine) -> None:
    """Looked at where the scheduler is in this process; told by the counts of another run where it is not."""
    scheduler = getattr(engine._opened.core, "_scheduler", None)
    if scheduler is not None:
        assert scheduler.num_free_blocks() == 24
        assert not scheduler.has_unfinished_requests()
        return
    outcome = run_on(engine, Block32Source([request(seq, range(3, 3 + 768 - 20)) for seq in range(2)]))
    assert sorted(outcome.finished) == [0, 1], "a request of nearly all of KV fits"
    assert outcome.total("num_finished") == 2
    assert outcome.total("num_preempted") == 0


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_windows_add_up_and_the_contract_holds_under_every_policy(
    either_engine: VllmEngine, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blend_core.engines.vllm.control.make_policy", checked_policy)
    requests = random_requests(40)
    outcome = run_with_policy(either_engine, Block32Source(requests, policy=policy), policy)

    assert sorted(outcome.finished) == list(range(40))
    prompts = sum(one.num_prompt_tokens for one in requests)
    cached = outcome.total("num_cached_tokens")
    assert outcome.total("num_prefill_tokens") - outcome.total("num_recomputed_tokens") + cached == prompts
    assert cached == sum(event.num_cached_tokens for event in outcome.finished.values())
    assert outcome.total("num_decode_tokens") == 40 * 15
    assert outcome.total("num_finished") == 40
    assert [window.batch_index for window in outcome.windows] == list(range(len(outcome.windows)))
    assert all(0 < window.kv_usage <= 1 for window in outcome.windows)
    assert all(0 < window.num_running_left + window.num_running_right <= 16 for window in outcome.windows)
    assert either_engine.num_steps == sum(window.num_steps for window in outcome.windows)
    assert_nothing_is_left(either_engine)


def test_admissions_are_told_before_the_step_that_computes_them(engine: VllmEngine) -> None:
    events = engine.run(Block32Source([request(seq, range(3, 9), LONG) for seq in range(3)]))
    scheduler = engine._opened.core._scheduler

    assert next(events) == RequestsAdmitted((0, 1, 2))
    assert scheduler._prepared is not None, "the step is decided and not computed"
    for _ in events:
        pass


def test_withdrawn_requests_leave_without_an_event(either_engine: VllmEngine) -> None:
    requests = [request(0, range(3, 9)), *(request(seq, range(3, 9), LONG) for seq in range(1, 40))]
    source = Block32Source(requests)

    def withdraw_when_the_first_is_done(event: EngineEvent) -> None:
        if isinstance(event, RequestFinished) and event.seq == 0:
            source.withdrawals = [0, 1, 25, 39]  # ended, in flight, queued, perhaps not even fetched

    outcome = run_on(either_engine, source, withdraw_when_the_first_is_done)

    assert set(outcome.finished) == set(range(40)) - {1, 25, 39}
    assert_nothing_is_left(either_engine)


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_what_is_withdrawn_together_with_a_revision_does_not_come_back(
    either_engine: VllmEngine, policy: str
) -> None:
    requests = [request(seq, range(3, 9), LONG if seq < 8 else SHORT) for seq in range(60)]
    source = Block32Source(requests, policy=policy)
    gone: set[int] = set()
    admitted_later: set[int] = set()

    def withdraw_and_revise(event: EngineEvent) -> None:
        if isinstance(event, RequestFinished) and not gone:
            gone.update(seq for seq in range(60) if seq % 2 == 0 and seq != event.seq)
            source.withdrawals = sorted(gone)
            left = [one for one in requests if one.seq not in gone and one.seq != event.seq]
            source.revisions = [plan_over(left, revision=1, block_size=BLOCK_SIZE, policy=policy)]
        elif isinstance(event, RequestsAdmitted) and gone:
            admitted_later.update(event.seqs)

    outcome = run_with_policy(either_engine, source, policy, withdraw_and_revise)

    assert outcome.finished.keys() - gone >= set(range(60)) - gone
    assert not outcome.failed
    assert not admitted_later & gone
    assert_nothing_is_left(either_engine)


@pytest.mark.parametrize("is_closed", [True, False])
def test_a_run_that_is_given_up_leaves_nothing_to_the_next(
    either_engine: VllmEngine, is_closed: bool
) -> None:
    given_up = either_engine.run(Block32Source([request(seq, range(3, 60), LONG) for seq in range(40)]))
    for event in given_up:
        if isinstance(event, RequestsAdmitted):
            break
    if is_closed:
        given_up.close()
    requests = random_requests(30)

    outcome = run_on(either_engine, Block32Source(requests))

    assert sorted(outcome.finished) == list(range(30))
    prompts = sum(one.num_prompt_tokens for one in requests)
    computed = outcome.total("num_prefill_tokens") - outcome.total("num_recomputed_tokens")
    assert computed + outcome.total("num_cached_tokens") == prompts
    assert outcome.total("num_finished") == 30
    assert_nothing_is_left(either_engine)


def test_a_revision_takes_over_between_steps_and_opens_a_window(either_engine: VllmEngine) -> None:
    requests = [request(seq, range(3, 60 + seq), LONG) for seq in range(30)]
    source = Block32Source(requests)
    told = False

    def revise(event: EngineEvent) -> None:
        nonlocal told
        if isinstance(event, RequestFinished) and not told:
            told = True
            waiting = [one for one in reversed(requests) if one.seq > 20]
            source.revisions = [plan_over(waiting, revision=1, block_size=BLOCK_SIZE)]

    outcome = run_on(either_engine, source, revise)

    assert sorted(outcome.finished) == list(range(30))
    assert {window.revision for window in outcome.windows} == {0, 1}
    revisions = [window.revision for window in outcome.windows]
    assert revisions == sorted(revisions)
    assert outcome.finished[29].revision == 1
    assert outcome.admitted.index(29) < outcome.admitted.index(21)


def test_requests_that_a_later_plan_adds_are_answered(either_engine: VllmEngine) -> None:
    requests = [request(seq, range(3, 9 + seq)) for seq in range(20)]
    source = Block32Source(requests)
    first, more = requests[:10], requests[10:]
    source.first_plan = plan_over(first, block_size=BLOCK_SIZE)
    told = False

    def add(event: EngineEvent) -> None:
        nonlocal told
        if isinstance(event, RequestFinished) and not told:
            told = True
            left = [one for one in first if one.seq != event.seq]
            source.revisions = [plan_over([*left, *more], block_size=BLOCK_SIZE)]

    outcome = run_on(either_engine, source, add)

    assert sorted(outcome.finished) == list(range(20))


def test_a_plan_for_other_blocks_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(PlanError, match="blocks of 16"):
        engine.run(ListSource([request(0, range(3, 9))]))


def test_bad_requests_become_errors_by_name_and_the_others_go_on(either_engine: VllmEngine) -> None:
    schema = SamplingParams(max_tokens=40, temperature=0, json_schema='{"type": "no-such-type"}')
    requests = [
        request(0, [5, 1024]),
        request(1, [5, -1]),
        request(2, range(3, 3 + 800)),
        request(3, []),
        request(4, range(3, 9), SamplingParams(4, json_schema="[1]")),
        request(5, range(3, 9), schema),
        Request(6, request(6, range(3, 9)).prompt_token_ids, SamplingParams(4), "no-such-adapter"),
        request(7, range(3, 9), SamplingParams(4, temperature=-1.0)),
        request(8, range(3, 9)),
        request(9, range(3, 9), SamplingParams(4, temperature=-1.0, json_schema='{"enum": [1]}')),
    ]

    outcome = run_on(either_engine, Block32Source(requests))

    assert {seq: event.code for seq, event in outcome.failed.items()} == {
        0: RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
        1: RequestErrorCode.TOKEN_OUT_OF_VOCABULARY,
        2: RequestErrorCode.PROMPT_TOO_LONG,
        3: RequestErrorCode.EMPTY_PROMPT,
        4: RequestErrorCode.INVALID_SCHEMA,
        5: RequestErrorCode.INVALID_SCHEMA,
        6: RequestErrorCode.UNKNOWN_LORA_ADAPTER,
        7: RequestErrorCode.ENGINE_FAILED,
        9: RequestErrorCode.ENGINE_FAILED,
    }
    assert list(outcome.finished) == [8]
    assert 'Unsupported type "no-such-type"' in outcome.failed[5].message


def test_any_number_of_bad_requests_is_passed_over(either_engine: VllmEngine) -> None:
    requests = [*(request(seq, []) for seq in range(200)), request(200, range(3, 9))]
    outcome = run_on(either_engine, Block32Source(requests))

    assert len(outcome.failed) == 200
    assert list(outcome.finished) == [200]


def test_answers_keep_to_a_json_schema(either_engine: VllmEngine) -> None:
    schema = '{"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}'
    sampling = SamplingParams(max_tokens=60, temperature=0, json_schema=schema)
    outcome = run_on(
        either_engine, Block32Source([request(seq, range(3, 9 + seq), sampling) for seq in range(4)])
    )

    assert {event.output_text.replace(" ", "").replace("\n", "") for event in outcome.finished.values()} <= {
        '{"a":1}',
        '{"a":2}',
    }
    assert len(outcome.finished) == 4


def test_a_request_that_takes_too_long_fails_alone(either_engine: VllmEngine) -> None:
    def ticking() -> Iterator[float]:
        now_s = 0.0
        while True:
            yield now_s
            now_s += 1.0

    clock = ticking()
    either_engine._elapsed, before = (lambda: next(clock)), either_engine._elapsed
    requests = [request(0, range(3, 9)), request(1, range(3, 40), LONG), request(2, range(5, 15))]
    try:
        outcome = run_with_policy(either_engine, Block32Source(requests), "fcfs", request_timeout_s=60)
    finally:
        either_engine._elapsed = before

    assert sorted(outcome.finished) == [0, 2]
    assert outcome.failed[1].code is RequestErrorCode.TIMED_OUT
    assert_nothing_is_left(either_engine)


@pytest.mark.slow
def test_twenty_thousand_requests_go_through_a_bounded_window(either_engine: VllmEngine) -> None:
    one_token = SamplingParams(max_tokens=1, temperature=0)
    source = Block32Source(
        [request(seq, range(3, 7 + seq % 8), one_token) for seq in range(MANY)], policy="dfs"
    )
    most_ahead = num_ended = 0

    def look(event: EngineEvent) -> None:
        nonlocal most_ahead, num_ended
        if isinstance(event, RequestFinished):
            num_ended += 1
            most_ahead = max(most_ahead, source.num_fetched - num_ended)

    for event in either_engine.run(source):
        look(event)

    assert num_ended == MANY
    assert most_ahead <= 8 * 16


def test_options_that_make_no_sense_are_refused_by_name(tiny_llama: object) -> None:
    folder = tiny_llama  # type: ignore[assignment]  # a path
    for passed, match in [
        ({"no_such_option": 1}, "'no_such_option' is not known"),
        ({"max_num_seqs": 4}, "BLEND_ENGINE__MAX_NUM_SEQS"),
        ({"tensor_parallel_size": "two"}, "'tensor_parallel_size' is 'two'; it must be a whole number"),
        ({"tensor_parallel_size": True}, "is True; it must be a whole number"),
    ]:
        with pytest.raises(ConfigurationError, match=match):
            options(folder, passed=passed)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="multiple of 32"):
        options(folder, block_size=16)  # type: ignore[arg-type]
