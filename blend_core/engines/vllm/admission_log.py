"""Admissions on their way from the scheduler's process to the run's, in memory that both have. No vLLM here.

A write is no system call: those let another thread of vLLM's core go on first, and a step would wait for it.
What was written can be read when the writer is gone.
"""

import mmap
import struct
from collections.abc import Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from blend_core.engines.vllm.reports import Admitted
from blend_core.errors import EngineError

_ENTRY: Final = struct.Struct("<qqqq")
_SPREAD: Final = 0x9E3779B97F4A7C1
"""An odd number whose multiples differ in many bits, so that the checks of two entries do, too."""


class AdmissionLog:
    """A ring of admissions with one writer and one reader, each of whom has one of these.

    An entry is its number, a seq, a revision and a check of them. The reader takes it if number and check are
    right: neither one of the round before nor one that is not all there.

    The writer must not come round to what is not read yet: the ring has more entries than there are requests
    that a run hands over before it reads. The reader finds out where it does.
    """

    def __init__(self, path: Path, num_entries: int | None = None) -> None:
        """Opens the ring of a file; makes one of `num_entries`, which are a few times a run's window."""
        with path.open("r+b" if num_entries is None else "w+b") as file:
            if num_entries is not None:
                # Zeros, not a hole: a disk that is full is found here, and does not kill the writer later.
                file.write(bytes(num_entries * _ENTRY.size))
                file.flush()
            self._memory = mmap.mmap(file.fileno(), 0)
        self._num_entries = len(self._memory) // _ENTRY.size
        self._number = 0

    def write(self, admitted: Admitted) -> None:
        """Adds admissions."""
        seqs, revision = admitted
        for seq in seqs:
            self._number += 1
            offset = self._number % self._num_entries * _ENTRY.size
            check = _check(self._number, seq, revision)
            _ENTRY.pack_into(self._memory, offset, self._number, seq, revision, check)

    def read(self) -> Iterator[Admitted]:
        """Yields the admissions that were written since the last call.

        Raises:
            EngineError: the writer has come round to what was not read.
        """
        for revision, entries in groupby(tuple(self._new_entries()), itemgetter(1)):
            yield Admitted(tuple(seq for seq, _ in entries), revision)

    def close(self) -> None:
        """Lets go of the memory. Idempotent."""
        self._memory.close()

    def _new_entries(self) -> Iterator[tuple[int, int]]:
        while True:
            expected = self._number + 1
            number, seq, revision, check = _ENTRY.unpack_from(
                self._memory, expected % self._num_entries * _ENTRY.size
            )
            if number < expected or check != _check(number, seq, revision):
                return
            if number > expected:
                raise EngineError(
                    "Admissions of vLLM were overwritten before they were read; open the engine anew and "
                    "report this."
                )
            self._number = expected
            yield seq, revision


def _check(number: int, seq: int, revision: int) -> int:
    return (number * _SPREAD ^ seq ^ revision << 40) & 0x7FFFFFFFFFFFFFFF
