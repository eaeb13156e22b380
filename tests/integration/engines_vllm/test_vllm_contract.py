"""What our scheduler and worker rest on in vLLM, assumption by assumption: a new vLLM fails here by name.

The parts are not public, so each is looked at in the vLLM that is installed.
"""

import inspect
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from blend_core.engines.vllm.admission_queue import AdmissionQueue
from blend_core.engines.vllm.engine import VllmEngine
from blend_core.engines.vllm.installed import SUPPORTED_SERIES, installed_vllm
from blend_core.engines.vllm.model_fit import check_model_fit
from blend_core.engines.vllm.passed_options import CLOSED_OPTIONS, LORA_RANKS, PASSED_OPTIONS
from blend_core.engines.vllm.scheduler_view import SEQ_ARGUMENT
from blend_core.errors import ConfigurationError
from blend_core.request import SamplingParams
from flows.settings import Settings
from tests.integration.engines_vllm.vllm_runs import Block32Source, run_on
from tests.tiny_llama import make_tiny_llama
from tests.unit.engines_torch.runs import random_requests, request


@pytest.fixture
def scheduler(engine: VllmEngine) -> Any:
    return engine._opened.core._scheduler


def assert_in_order(source: str, *texts: str) -> None:
    places = [source.index(text) for text in texts]
    assert places == sorted(places)


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]  # any function


def test_the_installed_series_is_the_one_that_is_supported() -> None:
    found = installed_vllm()
    assert found is not None
    assert found.version.startswith(f"{SUPPORTED_SERIES}.")


def test_every_option_that_passes_through_is_known_to_vllm() -> None:
    from vllm import EngineArgs

    assert PASSED_OPTIONS.keys() <= EngineArgs.__dataclass_fields__.keys()


def test_options_that_are_closed_have_vllms_values() -> None:
    from vllm.config.cache import CacheDType
    from vllm.config.lora import LoRADType, MaxLoRARanks
    from vllm.config.model import ModelDType
    from vllm.config.vllm import OptimizationLevel

    assert {name: set(values) for name, values in CLOSED_OPTIONS.items()} == {
        "dtype": set(get_args(ModelDType)),
        "kv_cache_dtype": set(get_args(CacheDType)),
        "lora_dtype": set(get_args(LoRADType)),
        "optimization_level": {level.value for level in OptimizationLevel},
    }
    assert get_args(MaxLoRARanks) == LORA_RANKS


LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.mark.parametrize(
    ("rope", "options", "variable", "is_taken"),
    [
        (None, {}, "0", False),
        (LLAMA_3, {}, "0", False),
        (LINEAR, {}, "0", True),
        (None, {"hf_overrides": {"rope_parameters": LINEAR}}, "0", True),
        (None, {}, "1", True),
    ],
    ids=["longer", "llama3", "scaled", "overridden", "allowed"],
)
def test_a_longer_context_than_the_models_is_refused_as_vllm_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rope: dict[str, object] | None,
    options: dict[str, Any],
    variable: str,
    is_taken: bool,
) -> None:
    from vllm import envs
    from vllm.config import ModelConfig

    # vLLM keeps its environment once an engine was opened in the process.
    envs.disable_envs_cache()
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", variable)
    is_allowed = Settings().is_any_context_length_taken
    folder = make_tiny_llama(tmp_path, max_model_len=256, rope_parameters=rope)
    asked = options | {"max_model_len": 512}
    with nullcontext() if is_taken else pytest.raises(ConfigurationError, match="is 256 tokens"):
        check_model_fit(asked, folder, "tiny", is_any_length_taken=is_allowed)
    with nullcontext() if is_taken else pytest.raises(ValueError, match="greater than the derived"):
        ModelConfig(model=str(folder), **asked)


def test_the_queue_has_every_method_of_vllms_queues() -> None:
    from vllm.v1.core.sched.request_queue import RequestQueue

    missing = [name for name in RequestQueue.__abstractmethods__ if not hasattr(AdmissionQueue, name)]
    assert not missing
    for name in RequestQueue.__abstractmethods__:
        assert parameters(getattr(AdmissionQueue, name)) == parameters(getattr(RequestQueue, name)), name


def test_schedule_and_update_have_the_signatures_that_are_overridden() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from blend_core.engines.vllm.scheduler import PolicyScheduler

    for name in ("schedule", "get_grammar_bitmask", "update_from_output"):
        assert parameters(getattr(AsyncScheduler, name)) == parameters(getattr(PolicyScheduler, name)), name


def test_nothing_else_of_the_scheduler_is_overridden() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from blend_core.engines.vllm.scheduler import AsyncPolicyScheduler, PolicyScheduler

    assert not any(map(inspect.isfunction, vars(AsyncPolicyScheduler).values()))
    own = {name for name, value in vars(PolicyScheduler).items() if inspect.isfunction(value)}
    assert {name for name in own if hasattr(AsyncScheduler, name)} == {
        "__init__",
        "schedule",
        "get_grammar_bitmask",
        "update_from_output",
    }


def test_the_bitmask_is_asked_for_while_a_step_is_computed() -> None:
    """What is done then is on no step's way."""
    from vllm.v1.engine.core import EngineCore

    step = inspect.getsource(EngineCore.step)
    assert_in_order(
        step,
        "execute_model(scheduler_output, non_block=True)",
        "get_grammar_bitmask(",
        "future.result()",
    )
    overlapping = inspect.getsource(EngineCore.step_with_batch_queue)
    assert_in_order(
        overlapping,
        "scheduler_output, non_block=True",
        "if not scheduler_output.pending_structured_output_tokens:",
        "get_grammar_bitmask(",
        "batch_queue.appendleft(",
        "future.result()",
        # For a step whose bitmask needs the tokens of the one before.
        "update_from_output(",
        "future = self.model_executor.sample_tokens(grammar_output, non_block=True)",
    )


def test_only_a_scheduler_that_schedules_ahead_is_vllms_asynchronous_one(scheduler: Any) -> None:
    """vLLM picks by the same word; given a class it takes it, and then its workers meet unknown tokens."""
    from vllm.config.scheduler import SchedulerConfig
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    from blend_core.engines.vllm.scheduler import scheduler_class

    assert "if self.async_scheduling:" in inspect.getsource(SchedulerConfig.get_scheduler_cls)
    for is_async in (True, False):
        named = resolve_obj_by_qualname(scheduler_class(is_async=is_async))
        assert issubclass(named, AsyncScheduler) is is_async
    assert not scheduler.scheduler_config.async_scheduling
    assert not isinstance(scheduler, AsyncScheduler)


def test_a_request_whose_token_is_on_its_way_is_left_out_as_the_step_budget_reckons() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    for text in (
        "self.current_step += 1",
        "if self.current_step < request.next_decode_eligible_step:",
        "and request.num_computed_tokens + 2 - request.num_output_placeholders\n"
        "                >= request.num_prompt_tokens + request.max_tokens",
        "+ request.num_output_placeholders\n                - request.num_computed_tokens",
    ):
        assert text in source, text


def test_generators_of_cpus_cannot_be_wound_back_as_vllm_does() -> None:
    """Where this fails, vLLM may no longer die of a request with a seed: our worker for CPUs can then go."""
    import torch
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "gen.set_offset(gen.get_offset() - 4)" in inspect.getsource(GPUModelRunner._bookkeeping_sync)
    with pytest.raises(RuntimeError, match="does not use offset"):
        torch.Generator("cpu").get_offset()


def test_our_worker_is_vllms_for_cpus_with_sample_tokens_overridden(scheduler: Any) -> None:
    from vllm.platforms.cpu import CpuPlatform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.cpu_worker import CPUWorker

    from blend_core.engines.vllm.cpu_worker import SeededCPUWorker

    assert resolve_obj_by_qualname(scheduler.parallel_config.worker_cls) is SeededCPUWorker
    taken = 'parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"'
    assert taken in inspect.getsource(CpuPlatform.check_and_update_config)
    assert SeededCPUWorker.__bases__ == (CPUWorker,)
    own = {name for name, value in vars(SeededCPUWorker).items() if inspect.isfunction(value)}
    assert own == {"sample_tokens"}
    assert parameters(SeededCPUWorker.sample_tokens) == parameters(CPUWorker.sample_tokens)


def test_a_batch_stays_as_it_is_from_sampling_to_where_generators_are_wound_back() -> None:
    """Both are in `sample_tokens`; who is in which row, and whose token is thrown away, is set before."""
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert "return self.model_runner.sample_tokens(grammar_output)" in inspect.getsource(
        CPUWorker.sample_tokens
    )
    sampling = inspect.getsource(GPUModelRunner.sample_tokens)
    assert_in_order(sampling, "self._sample(", "self._bookkeeping_sync(")
    computing = inspect.getsource(GPUModelRunner.execute_model)
    assert_in_order(computing, "self._update_states(", "self._prepare_inputs(")
    assert "self.discard_request_mask.np[:num_reqs] =" in inspect.getsource(GPUModelRunner._prepare_inputs)
    assert "_sample(" not in computing
    for text in ("_update_states(", "_prepare_inputs(", "condense(", "swap_states(", "remove_request("):
        assert text not in sampling, text


def test_the_sampler_draws_from_the_batchs_own_generators(engine: VllmEngine) -> None:
    """Not from a copy: what is taken out of the one is not in the other."""
    core = engine._opened.core._llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    assert runner.input_batch.sampling_metadata.generators is runner.input_batch.generators
    assert runner.input_batch._make_sampling_metadata().generators is runner.input_batch.generators
    assert runner.discard_request_mask.np.shape == (runner.max_num_reqs,)


def test_schedule_asks_bool_then_peeks_then_pops() -> None:
    """`bool(queue)` guards `peek_request`; `pop_request` follows an allocation, or skips."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler.schedule)
    assert_in_order(
        source,
        "if not request_queue or",
        "request_queue.peek_request()",
        "                    num_tokens_past_hit,\n",
        "request = request_queue.pop_request()\n                self.deferred_waiting.discard",
        "RequestStatus.RUNNING\n                request.num_computed_tokens = num_computed_tokens",
        "self.waiting.prepend_requests(step_skipped_waiting)",
    )


def test_the_token_budget_of_a_step_is_an_attribute_that_schedule_reads() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "token_budget = self.max_num_scheduled_tokens" in inspect.getsource(Scheduler.schedule)


def test_a_preempted_request_comes_back_by_prepend_request() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler._preempt_request)
    assert "self.waiting.prepend_request(request)" in source
    assert "request.num_computed_tokens = 0" in source


def test_ids_of_ended_requests_are_kept_until_a_step_is_scheduled() -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    assert "self.finished_req_ids.add(request_id)" in inspect.getsource(Scheduler._free_request)
    assert "self.finished_req_ids = set()" in inspect.getsource(Scheduler._update_after_schedule)


def test_the_scheduler_has_the_attributes_that_are_read(scheduler: Any) -> None:
    pool = scheduler.kv_cache_manager.block_pool
    assert scheduler.waiting is scheduler.admission
    assert pool.num_gpu_blocks == 25
    assert pool.get_num_free_blocks() == 24
    assert scheduler.kv_cache_manager.usage == 0.0
    assert scheduler.max_num_active_reqs == 16
    assert scheduler.max_num_scheduled_tokens == scheduler.scheduler_config.max_num_batched_tokens == 128
    assert scheduler.running == []
    assert scheduler.lora_config is None
    assert scheduler.vllm_config.additional_config == {}
    assert scheduler.vllm_config.max_concurrent_batches == 1
    assert scheduler.parallel_config.pipeline_parallel_size == 1
    assert scheduler.max_model_len == scheduler.vllm_config.model_config.max_model_len
    assert scheduler.current_step >= 0


def test_a_request_has_the_attributes_that_are_read() -> None:
    from vllm import SamplingParams as VllmSampling
    from vllm.v1.request import Request, RequestStatus

    from blend_core.engines.vllm import scheduler as scheduler_module

    one = Request("1-a", [5, 6, 7], VllmSampling(max_tokens=4, extra_args={SEQ_ARGUMENT: 1}), None)
    assert one.sampling_params.extra_args[SEQ_ARGUMENT] == 1
    assert (one.num_tokens, one.num_prompt_tokens, one.num_output_tokens) == (3, 3, 0)
    assert (one.num_computed_tokens, one.num_output_placeholders, one.num_stale_output_tokens) == (0, 0, 0)
    assert one.next_decode_eligible_step == 0
    assert (one.max_tokens, one.drop_stale_output, one.lora_request) == (4, False, None)
    assert one.status == RequestStatus.WAITING
    assert {"RUNNING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"} <= set(RequestStatus.__members__)
    answered = {"FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_ABORTED"}
    assert {str(status) for status in scheduler_module.ANSWERED} == answered


def test_a_request_has_its_last_status_before_its_end_is_told() -> None:
    """The queue reads from it whether there is an answer; what is aborted while it waits has none yet."""
    from vllm.v1.core.sched.scheduler import Scheduler

    source = inspect.getsource(Scheduler._free_request)
    assert source.index("assert request.is_finished()") < source.index(
        "self.finished_req_ids.add(request_id)"
    )
    source = inspect.getsource(Scheduler.finish_requests)
    assert source.index("self.waiting.remove_requests") < source.index("request.status = finished_status")


def test_cached_blocks_of_a_waiting_request_are_told_with_their_references(
    engine: VllmEngine, scheduler: Any
) -> None:
    run_on(engine, Block32Source([request(0, range(3, 103))]))
    from vllm import SamplingParams as VllmSampling
    from vllm.v1.request import Request

    hasher = engine._opened.core._llm_engine.engine_core.engine_core.request_block_hasher
    one = Request("9-a", list(range(3, 103)), VllmSampling(), None, block_hasher=hasher)
    blocks, num_tokens, _ = scheduler.kv_cache_manager.get_computed_blocks(one)
    assert num_tokens == 96
    assert [block.ref_cnt for block in blocks.blocks[0]] == [0, 0, 0]
    assert scheduler.num_held_blocks(one) == 0


def test_a_step_that_was_prepared_is_the_one_that_vllm_computes() -> None:
    """`EngineCore.step` calls `schedule` once, and nothing between `has_requests` and it."""
    from vllm.v1.engine.core import EngineCore

    for step in (EngineCore.step, EngineCore.step_with_batch_queue):
        assert inspect.getsource(step).count("self.scheduler.schedule(") == 1
        assert inspect.getsource(step).count("self.scheduler.update_from_output(") == 1


def test_a_separate_core_queues_its_outputs_where_they_can_be_looked_for() -> None:
    from vllm.v1.engine.core_client import SyncMPClient

    # A `queue.Queue`, at whose `not_empty` and `queue` a run waits.
    assert "self.outputs_queue = queue.Queue[" in inspect.getsource(SyncMPClient.__init__)
    assert "self.outputs_queue.get()" in inspect.getsource(SyncMPClient.get_output)


def test_a_separate_core_that_ended_is_told_by_ensure_alive() -> None:
    from vllm.v1.engine.core_client import MPClient, SyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    resources = SimpleNamespace(engine_dead=False)
    SyncMPClient.ensure_alive(SimpleNamespace(resources=resources))
    resources.engine_dead = True
    with pytest.raises(EngineDeadError):
        SyncMPClient.ensure_alive(SimpleNamespace(resources=resources))
    # Nobody has to ask the core for it.
    source = inspect.getsource(MPClient.start_engine_core_monitor)
    assert "_self.resources.engine_dead = True" in source
    assert "self.start_engine_core_monitor()" in inspect.getsource(MPClient.__init__)


def test_an_answer_that_a_stop_string_ends_is_aborted_in_the_core(
    engine: VllmEngine, scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The front end finds the string, so the last status of the request is that of an abort."""
    from vllm.v1.request import RequestStatus

    to_the_end = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    (whole,) = run_on(engine, Block32Source([request(0, range(3, 9), to_the_end)])).finished.values()
    half = whole.output_text[: len(whole.output_text) // 2]
    told = []
    finish_requests = scheduler.finish_requests

    def noting(request_ids: Any, status: Any) -> Any:
        told.append((list(request_ids), status))
        return finish_requests(request_ids, status)

    monkeypatch.setattr(scheduler, "finish_requests", noting)
    stopped = replace(to_the_end, stop=(half[-1],))
    (answer,) = run_on(engine, Block32Source([request(0, range(3, 9), stopped)])).finished.values()

    assert answer.finish_reason == "stop"
    assert half.startswith(answer.output_text)
    ((request_ids, status),) = told
    assert len(request_ids) == 1
    assert status is RequestStatus.FINISHED_ABORTED


def test_vllms_batch_runner_reads_its_file_after_set_up_and_writes_when_every_answer_is_there() -> None:
    from vllm.entrypoints.launchers import run_batch

    source = inspect.getsource(run_batch.run_batch)
    assert_in_order(
        source,
        "await build_endpoint_registry(",
        "await read_file(args.input_file)",
        "await asyncio.gather(*response_futures)",
        "await write_file(args.output_file",
    )


def test_json_schemas_are_checked_in_one_place() -> None:
    from vllm import SamplingParams as VllmSampling

    from blend_core.engines.vllm.requests import SCHEMA_CHECK

    assert SCHEMA_CHECK in inspect.getsource(VllmSampling.verify)


def test_outputs_say_what_events_need(engine: VllmEngine) -> None:
    outcome = run_on(engine, Block32Source(random_requests(2, sampling=SamplingParams(3, temperature=0.0))))
    for event in outcome.finished.values():
        assert event.finish_reason in ("stop", "length")
        assert event.num_output_tokens <= 3
