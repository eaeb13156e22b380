"""What is said of queued jobs where there is no Prefect to ask."""

from flows.prefect_queue import queued_jobs


def test_without_a_prefect_nothing_is_queued() -> None:
    assert queued_jobs(None) == frozenset()


def test_of_a_prefect_that_does_not_answer_nothing_is_known() -> None:
    assert queued_jobs("http://127.0.0.1:9/api") is None
