"""Repeated ids are found exactly as a plain dictionary finds them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.ingest.custom_ids import CustomIds


@given(st.lists(st.lists(st.text("abc", max_size=3), max_size=20), max_size=12))
def test_first_uses_are_those_of_a_dictionary(batches: list[list[str]]) -> None:
    ids, seen, position = CustomIds(), dict[str, int](), 0
    for batch in batches:
        positions = np.arange(position, position + len(batch), dtype=np.int64)
        expected = [
            first if (first := seen.setdefault(one, place)) != place else -1
            for one, place in zip(batch, positions.tolist(), strict=True)
        ]
        assert ids.add(batch, positions).tolist() == expected
        position += len(batch)
    assert len(ids) == len(seen)


def test_many_batches_keep_few_runs() -> None:
    ids = CustomIds()
    for start in range(0, 20_000, 100):
        found = ids.add([f"r-{n}" for n in range(start, start + 100)], np.arange(start, start + 100))
        assert (found == -1).all()
    assert len(ids._runs) <= 10
    assert ids.add(["r-0", "r-19999"], np.array([20_000, 20_001])).tolist() == [0, 19_999]


def test_digests_that_share_a_half_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_alike(custom_id: str) -> bytes:
        return bytes(8) + custom_id.encode().ljust(8, b"\0")

    monkeypatch.setattr("flows.ingest.custom_ids._digest", half_alike)
    ids = CustomIds()
    names = [f"r-{number}" for number in range(30)]
    for start in range(0, 30, 3):
        assert (ids.add(names[start : start + 3], np.arange(start, start + 3)) == -1).all()
    assert ids.add([*names, "new"], np.arange(30, 61)).tolist() == [*range(30), -1]
