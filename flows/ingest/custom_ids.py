"""Finds repeated `custom_id`s among millions in little memory: 24 bytes each, in sorted runs of digests."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Digests in ascending order of their first half, and where each was first used.

    Two halves because numpy compares numbers many times faster than strings of bytes.
    """

    first_halves: npt.NDArray[np.uint64]
    second_halves: npt.NDArray[np.uint64]
    positions: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> "_Run":
        """The named rows, in that order."""
        return _Run(self.first_halves[rows], self.second_halves[rows], self.positions[rows])


class CustomIds:
    """The `custom_id`s of a job so far, and where each was first used.

    Two ids count as equal where 128-bit digests are: for a billion ids the odds of a mistake are below 1e-20.

    Invariants:
        - no digest lies in two runs;
        - each run is less than half as long as the one before it, so there are few.
    """

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[_Run] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    def add(self, custom_ids: Sequence[str], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Add ids in the order of their use and say which were used before.

        Args:
            custom_ids: the next ids.
            positions: `(len(custom_ids),)` where each is used: any numbers from 0 that grow from use to use.

        Returns:
            `(len(custom_ids),)` position of the first use where the id was used before, -1 where it is new.
        """
        first_use = np.full(len(custom_ids), -1, dtype=np.int64)
        if not len(custom_ids):
            return first_use
        digests = np.frombuffer(b"".join(map(_digest, custom_ids)), dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((digests[:, 1], digests[:, 0]))  # stable: equal ids stay in the order of use
        used = _Run(digests[order, 0], digests[order, 1], positions[order])
        starts = np.ones(len(used), dtype=np.bool_)
        starts[1:] = (used.first_halves[1:] != used.first_halves[:-1]) | (
            used.second_halves[1:] != used.second_halves[:-1]
        )
        unique = used.take(starts)
        known = self._find(unique)
        new = known < 0
        first_position = np.where(new, unique.positions, known)[np.cumsum(starts) - 1]
        repeated = first_position != used.positions
        first_use[order[repeated]] = first_position[repeated]
        self._append(unique.take(new))
        return first_use

    def _find(self, wanted: _Run) -> npt.NDArray[np.int64]:
        found = np.full(len(wanted), -1, dtype=np.int64)
        for run in self._runs:
            rows = np.arange(len(wanted))
            place = np.searchsorted(run.first_halves, wanted.first_halves)
            # One round for nearly all; another only for digests that share their first half with others.
            while len(rows):
                inside = place < len(run)
                rows, place = rows[inside], place[inside]
                alike = run.first_halves[place] == wanted.first_halves[rows]
                rows, place = rows[alike], place[alike]
                equal = run.second_halves[place] == wanted.second_halves[rows]
                found[rows[equal]] = run.positions[place[equal]]
                rows, place = rows[~equal], place[~equal] + 1
        return found

    def _append(self, run: _Run) -> None:
        if not len(run):
            return
        while self._runs and len(self._runs[-1]) <= 2 * len(run):
            run = _merge(self._runs.pop(), run)
        self._runs.append(run)


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()


def _merge(left: _Run, right: _Run) -> _Run:
    # Place each digest of the shorter run in the longer one: no sort of the whole.
    places = np.searchsorted(left.first_halves, right.first_halves)
    return _Run(
        np.insert(left.first_halves, places, right.first_halves),
        np.insert(left.second_halves, places, right.second_halves),
        np.insert(left.positions, places, right.positions),
    )
