"""Admissions in memory that two processes have."""

import random
import subprocess
import sys
import time

import pytest

from blend_core.engines.vllm.admission_log import AdmissionLog, _check
from blend_core.engines.vllm.reports import Admitted
from blend_core.errors import EngineError

WRITER = """
import os, signal, sys
from pathlib import Path
from blend_core.engines.vllm.admission_log import AdmissionLog
from blend_core.engines.vllm.reports import Admitted
log = AdmissionLog(Path(sys.argv[1]))
for seq in range(0, 3_000, 3):
    log.write(Admitted((seq, seq + 1, seq + 2), seq // 1_500))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def path(tmp_path):
    return tmp_path / "admissions"


@pytest.fixture
def reader(path):
    log = AdmissionLog(path, 64)
    yield log
    log.close()


@pytest.fixture
def writer(reader, path):
    log = AdmissionLog(path)
    yield log
    log.close()


def test_nothing_is_read_where_nothing_was_written(reader):
    assert list(reader.read()) == []


def test_what_was_written_is_read_once_and_by_revision(reader, writer):
    writer.write(Admitted((0,), 0))
    writer.write(Admitted((7, 5), 0))
    writer.write(Admitted((6,), 1))
    assert list(reader.read()) == [Admitted((0, 7, 5), 0), Admitted((6,), 1)]
    assert list(reader.read()) == []


def test_the_ring_goes_round(reader, writer):
    # The same seqs again and again: an entry of the round before must not be taken for a new one.
    for number in range(500):
        seqs = tuple(range(number % 40))
        writer.write(Admitted(seqs, 0))
        assert list(reader.read()) == ([Admitted(seqs, 0)] if seqs else [])


def test_an_entry_that_is_not_all_there_waits(reader, writer):
    writer.write(Admitted((3,), 2))
    offset = 1 * 32 + 24
    check, reader._memory[offset : offset + 8] = reader._memory[offset : offset + 8], bytes(8)
    assert list(reader.read()) == []
    reader._memory[offset : offset + 8] = check
    assert list(reader.read()) == [Admitted((3,), 2)]


def test_checks_of_other_numbers_differ():
    generator = random.Random(0)
    for _ in range(10_000):
        number = generator.randrange(1, 1 << 40)
        other = generator.randrange(1 << 32), generator.randrange(1 << 10)
        assert _check(number + 64, *other) != _check(number, 5, 1)


def test_a_writer_that_has_come_round_is_noticed(reader, writer):
    writer.write(Admitted(tuple(range(64 + 1)), 0))
    with pytest.raises(EngineError, match="overwritten before they were read"):
        list(reader.read())


def test_what_a_killed_process_wrote_is_read_while_it_writes_and_afterwards(path):
    reader = AdmissionLog(path, 4_096)
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)])
    read = []
    while writer.poll() is None:
        read += reader.read()
        time.sleep(0.001)
    read += reader.read()

    assert writer.returncode < 0
    assert [seq for one in read for seq in one.seqs] == list(range(3_000))
    assert {seq: one.revision for one in read for seq in one.seqs} == {
        seq: seq // 1_500 for seq in range(3_000)
    }
    reader.close()
