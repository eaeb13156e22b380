"""Files of benchmarks: what cannot be tokenised, and the clock over vLLM's batch runner."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from blend_core.errors import ConfigurationError, RequestError, RequestErrorCode
from blend_core.request import SamplingParams
from flows.bench.engine import numbered_requests
from flows.bench.versus_process import time_file

ANSWER = SamplingParams(4)


def prompt(*token_ids):
    return np.array(token_ids, dtype=np.int32)


def test_requests_are_numbered_by_their_place_in_the_file():
    requests = numbered_requests([(prompt(3, 4), ANSWER), (prompt(5), ANSWER)])

    assert [one.seq for one in requests] == [0, 1]
    assert [one.prompt_token_ids.tolist() for one in requests] == [[3, 4], [5]]


def test_a_prompt_that_cannot_be_tokenised_is_refused_by_its_place():
    failed = RequestError("The chat template failed.", RequestErrorCode.CHAT_TEMPLATE_FAILED)

    with pytest.raises(ConfigurationError, match=r"Prompt 1 .*chat_template_failed"):
        numbered_requests([(prompt(3), ANSWER), (failed, ANSWER), (prompt(4), ANSWER)])


def test_the_batch_runners_clock_runs_from_reading_its_file_to_writing_its_answers():
    ticks = iter(range(100))

    async def read_file(path):
        next(ticks)
        return path

    async def write_file(path, answers):
        next(ticks)

    runner = SimpleNamespace(read_file=read_file, write_file=write_file)
    clock = time_file(runner, lambda: float(next(ticks)))

    async def run():
        next(ticks)  # endpoints are set up
        assert await runner.read_file("in") == "in"
        next(ticks)  # answers come
        await runner.write_file("out", [])

    asyncio.run(run())
    assert clock == {"read_file": 1.0, "write_file": 4.0}
