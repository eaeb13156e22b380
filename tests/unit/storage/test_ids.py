from storage.ids import new_id


def test_ids_sort_by_the_time_they_were_made_and_differ() -> None:
    ids = [new_id("job") for _ in range(1_000)]
    assert len(set(ids)) == 1_000
    times = [identifier[: len("job_") + 10] for identifier in ids]
    assert times == sorted(times)
    assert all(len(identifier) == len("job_") + 20 for identifier in ids)
