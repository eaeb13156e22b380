"""Finds repeated `custom_id`s among millions in little memory: 24 bytes each, in sorted runs of digests."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

_DIGEST_BYTES = 16
_DIGEST = np.dtype(f"S{_DIGEST_BYTES}")


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Digests in ascending order and where each was first used."""

    digests: npt.NDArray[np.bytes_]
    positions: npt.NDArray[np.int64]


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
        return sum(len(run.digests) for run in self._runs)

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
        digests = np.frombuffer(b"".join(map(_digest, custom_ids)), dtype=_DIGEST)
        unique, first_index, inverse = np.unique(digests, return_index=True, return_inverse=True)
        known = self._find(unique)
        first_position = np.where(known < 0, positions[first_index], known)[inverse]
        repeated = first_position != positions
        first_use[repeated] = first_position[repeated]
        new = known < 0
        self._append(_Run(unique[new], positions[first_index[new]]))
        return first_use

    def _find(self, digests: npt.NDArray[np.bytes_]) -> npt.NDArray[np.int64]:
        found = np.full(len(digests), -1, dtype=np.int64)
        for run in self._runs:
            place = np.searchsorted(run.digests, digests)
            place[place == len(run.digests)] = 0
            hit = run.digests[place] == digests
            found[hit] = run.positions[place[hit]]
        return found

    def _append(self, run: _Run) -> None:
        if not len(run.digests):
            return
        while self._runs and len(self._runs[-1].digests) <= 2 * len(run.digests):
            run = _merge(self._runs.pop(), run)
        self._runs.append(run)


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode(), digest_size=_DIGEST_BYTES).digest()


def _merge(left: _Run, right: _Run) -> _Run:
    # Place each digest of the shorter run in the longer one: no sort of the whole.
    places = np.searchsorted(left.digests, right.digests)
    return _Run(
        np.insert(left.digests, places, right.digests), np.insert(left.positions, places, right.positions)
    )
