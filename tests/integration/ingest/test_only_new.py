"""A job of a name reads what no earlier job of that name has: rows by watermark, objects by version."""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from blend_core.errors import SourceError, StorageUnavailableError
from blend_core.tokenizing import Tokenizer
from flows.ingest.ingest import ingest
from flows.ingest.only_new import OnlyNew, source_identities
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec
from storage.database import Database
from storage.job_status import JobStatus
from storage.jobs import close_pending, create_job, set_job_status
from storage.objects import ObjectStore
from storage.ownership import Run
from storage.readings import Readings, known_sources, reset_readings
from storage.request_shard_writer import RequestShardWriter
from storage.requests import RequestWriter
from storage.schema import request, result, source_reading

pytestmark = [pytest.mark.postgres, pytest.mark.s3]

LINE = '{"custom_id": "%s", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'


class Nights:
    """Jobs of one name over one table and one folder."""

    def __init__(self, db: Database, objects: ObjectStore, model: Path, name: str, column_type: str) -> None:
        self.db, self.objects, self.name = db, objects, name
        self._tokenizer = Tokenizer(model)
        with self.sql() as connection:
            connection.execute(f"CREATE TABLE {name} (id int, at {column_type}, body text DEFAULT '50% off')")
        self.query = f"SELECT id, at, body FROM {name} WHERE body LIKE '%off' -- all of them"

    def sql(self) -> psycopg.Connection:
        return psycopg.connect(self.db.url)

    def add(self, *rows: tuple[int | None, Any]) -> None:
        with self.sql() as connection:
            connection.cursor().executemany(f"INSERT INTO {self.name} (id, at) VALUES (%s, %s)", rows)

    def put(self, key: str, *ids: str) -> None:
        self.objects.put(f"{self.name}/{key}", "".join(LINE % custom_id for custom_id in ids).encode())

    def put_table(self, key: str, *ids: int) -> None:
        content = io.BytesIO()
        pq.write_table(pa.table({"id": ids, "body": ["x"] * len(ids)}), content)
        self.objects.put(f"{self.name}/{key}", content.getvalue())

    def spec(self, **fields: Any) -> BatchJobSpec:
        source = {"query": self.query, "prompt": "{{ body }}", "watermark_column": "at"}
        return BatchJobSpec.model_validate({"name": self.name, "sql": [source], **fields})

    def s3_spec(self) -> BatchJobSpec:
        return self.spec(sql=[], s3=[self.objects.uri(f"{self.name}/")], s3_only_new=True)

    def begin(self, spec: BatchJobSpec | None = None) -> "tuple[str, Callable[[], None]]":
        """A job that knows what is new, and the call that reads it."""
        spec = spec or self.spec()
        job_id = create_job(self.db, name=self.name, model="tiny", spec=spec.model_dump(mode="json"))
        only_new = OnlyNew(spec, Readings(self.db, self.name))

        def read() -> None:
            ingest(
                read_sources(
                    spec, self.objects, {"platform": self.db.url}, ParseOptions("tiny"), only_new=only_new
                ),
                self._tokenizer,
                RequestWriter(self.db, job_id, on_complete=partial(only_new.record, job_id=job_id)),
                RequestShardWriter(self.objects, Run("run", job_id, 1)),
                max_model_len=200,
            )

        return job_id, read

    def night(
        self, spec: BatchJobSpec | None = None, end: JobStatus = JobStatus.COMPLETED
    ) -> list[str | None]:
        """The ids that one night reads; it ends with an answer for each, or without any."""
        job_id, read = self.begin(spec)
        read()
        self.end(job_id, end)
        return self.ids(job_id)

    def end(self, job_id: str, end: JobStatus, answered: tuple[str, ...] = ()) -> None:
        with self.db.connect() as connection:
            connection.execute(
                sa.text(
                    "WITH done AS (INSERT INTO result"
                    " (job_id, seq, status, output_text, finish_reason, finished_at)"
                    " SELECT job_id, seq, 'succeeded', 'yes', 'stop', now() FROM request"
                    " WHERE job_id = :job_id AND (:all OR custom_id = ANY(:ids))"
                    " RETURNING 1) UPDATE batch_job SET num_succeeded = (SELECT count(*) FROM done)"
                    " WHERE job_id = :job_id"
                ),
                {"job_id": job_id, "all": end is JobStatus.COMPLETED, "ids": list(answered)},
            )
        if end is JobStatus.COMPLETED:
            set_job_status(self.db, job_id, JobStatus.FINALIZING)
        elif end is not JobStatus.FAILED:
            close_pending(self.db, job_id, end)
        set_job_status(self.db, job_id, end)

    def ids(self, job_id: str) -> list[str | None]:
        with self.db.connect() as connection:
            found = connection.execute(sa.select(request.c.custom_id).where(request.c.job_id == job_id))
            return sorted(found.scalars(), key=str)

    def errors(self, job_id: str) -> list[str]:
        """The messages of the job's error rows."""
        with self.db.connect() as connection:
            found = connection.execute(
                sa.select(result.c.error_message).where(
                    result.c.job_id == job_id, result.c.status == "errored"
                )
            )
            return list(found.scalars())


@pytest.fixture
def nights(db: Database, objects: ObjectStore, model_folder: Path, request: pytest.FixtureRequest) -> Nights:
    name = f"night_{abs(hash(request.node.name)) % 10**8}"
    return Nights(db, objects, model_folder, name, getattr(request, "param", "timestamptz"))


TIMES = ("2026-11-27 10:00+01", "2026-11-28 10:00:00.123456+01", "2026-11-29 10:00+01")


def test_each_night_reads_the_rows_that_came_since(nights: Nights) -> None:
    nights.add((1, TIMES[0]), (2, TIMES[1]), (3, None))
    assert nights.night() == ["1", "2"]
    assert nights.night() == []
    nights.add((4, TIMES[2]))
    assert nights.night() == ["4"]
    (known,) = known_sources(nights.db, nights.name)
    assert (known.source, known.num_read) == ("platform:at", 3)
    assert known.watermark is not None
    assert known.watermark.startswith("2026-11-29T")


@pytest.mark.parametrize(
    ("nights", "values"),
    [
        ("bigint", (1, 2, 3)),
        ("numeric", ("0.1", "0.10000000000000000000000001", "1e30")),
        ("date", ("0044-03-15 BC", "2026-11-28", "infinity")),
        ("text", ("a", "b'; DROP TABLE x; --", "c")),
        ("float8", (0.1, 0.30000000000000004, 1e300)),
        ("uuid", tuple(f"0190a000-0000-7000-8000-00000000000{n}" for n in (1, 2, 3))),
    ],
    indirect=["nights"],
)
def test_any_ordered_type_can_be_a_watermark(nights: Nights, values: tuple[Any, ...]) -> None:
    for number, value in enumerate(values):
        nights.add((number, value))
        assert nights.night() == [str(number)]
    assert nights.night() == []


def test_rows_of_the_watermarks_own_time_that_come_later_are_new(nights: Nights) -> None:
    nights.add((1, TIMES[0]), (2, TIMES[0]))
    assert nights.night() == ["1", "2"]
    nights.add((3, TIMES[0]))
    assert nights.night() == ["3"]
    nights.add((4, TIMES[0]), (5, TIMES[1]))
    assert nights.night() == ["4", "5"]
    nights.add((6, TIMES[1]))
    assert nights.night() == ["6"]
    assert nights.night() == []


def test_a_row_without_an_id_that_comes_late_is_told_until_the_watermark_moves_on(nights: Nights) -> None:
    nights.add((1, TIMES[0]))
    assert nights.night() == ["1"]
    nights.add((None, TIMES[0]))
    for _ in range(2):
        job_id, read = nights.begin()
        read()
        assert nights.errors(job_id) == ["The id column 'id' is NULL."]
        nights.end(job_id, JobStatus.CANCELLED)
    nights.add((2, TIMES[1]))
    job_id, read = nights.begin()
    read()
    assert (nights.ids(job_id), len(nights.errors(job_id))) == (["2", None], 1)
    nights.end(job_id, JobStatus.CANCELLED, answered=("2",))
    assert nights.night() == []


@pytest.mark.parametrize(
    ("nights", "values"),
    [("numeric", ("1.0", "1.00", "1")), ("interval", ("24:00:00", "1 day", "1440 minutes"))],
    indirect=["nights"],
)
def test_equal_watermarks_that_are_written_differently_are_one(
    nights: Nights, values: tuple[str, ...]
) -> None:
    for number, value in enumerate(values):
        nights.add((number, value))
        assert nights.night() == [str(number)]
    assert nights.night() == []


def test_ids_that_are_padded_with_spaces_are_read_once(nights: Nights) -> None:
    nights.query = f"SELECT id::text::char(4) AS id, at, body FROM {nights.name}"
    nights.add((1, TIMES[0]))
    assert nights.night() == ["1   "]
    nights.add((2, TIMES[0]))
    job_id, read = nights.begin()
    read()
    assert nights.ids(job_id) == ["2   "]
    nights.end(job_id, JobStatus.CANCELLED)
    assert nights.night() == ["2   "]
    assert nights.night() == []


@pytest.mark.parametrize("end", [JobStatus.CANCELLED, JobStatus.EXPIRED, JobStatus.FAILED])
def test_what_a_job_left_without_a_result_is_read_by_the_next_and_nothing_else(
    nights: Nights, end: JobStatus
) -> None:
    nights.add((1, TIMES[0]), (2, TIMES[0]), (3, TIMES[1]))
    job_id, read = nights.begin()
    read()
    nights.end(job_id, end, answered=("2",))
    nights.add((4, TIMES[2]))
    assert nights.night(end=JobStatus.CANCELLED) == ["1", "3", "4"]
    assert nights.night() == ["1", "3", "4"]
    assert nights.night() == []


def test_a_reading_that_did_not_end_is_none(nights: Nights) -> None:
    nights.add((1, TIMES[0]))
    job_id, read = nights.begin(nights.spec(s3=[nights.objects.uri("nothing/")]))
    with pytest.raises(SourceError):
        read()
    set_job_status(nights.db, job_id, JobStatus.FAILED)
    assert nights.night() == ["1"]


def test_while_a_job_runs_its_rows_are_its_own(nights: Nights) -> None:
    nights.add((1, TIMES[0]))
    first, read = nights.begin()
    read()
    nights.add((2, TIMES[1]))
    assert nights.night() == ["2"]
    nights.end(first, JobStatus.COMPLETED)
    assert nights.night() == []


def test_of_two_jobs_that_read_at_once_only_one_keeps_the_rows(nights: Nights) -> None:
    nights.add((1, TIMES[0]))
    first, read_first = nights.begin()
    second, read_second = nights.begin()
    read_first()
    with pytest.raises(StorageUnavailableError, match=f"meanwhile.*run job {second} again"):
        read_second()
    with nights.db.connect() as connection:
        jobs = connection.execute(
            sa.select(source_reading.c.job_id).where(source_reading.c.job_name == nights.name)
        )
        assert jobs.scalars().all() == [first]


def test_an_object_is_read_once_in_each_version(nights: Nights) -> None:
    spec = nights.s3_spec()
    nights.put("a", "a1", "a2")
    assert nights.night(spec) == ["a1", "a2"]
    assert nights.night(spec) == []
    nights.put("b", "b1")
    nights.put("a", "a3")
    assert nights.night(spec) == ["a3", "b1"]
    assert nights.night(spec) == []


def test_of_a_cancelled_job_only_the_lines_without_a_result_are_read_again(nights: Nights) -> None:
    spec = nights.s3_spec()
    nights.put("a", "a1", "a2", "a3")
    nights.put("b", "b1")
    job_id, read = nights.begin(spec)
    read()
    nights.end(job_id, JobStatus.CANCELLED, answered=("a2", "b1"))
    assert nights.night(spec, end=JobStatus.CANCELLED) == ["a1", "a3"]
    assert nights.night(spec) == ["a1", "a3"]
    assert nights.night(spec) == []


def test_a_table_is_read_by_objects_as_well_and_only_once(nights: Nights) -> None:
    uri = nights.objects.uri(f"{nights.name}/")
    table = {"uri": uri, "prompt": "Say {{ body }}"}
    spec = nights.spec(sql=[], parquet=[table], s3_only_new=True)
    nights.put_table("a", 1, 2, 3)
    job_id, read = nights.begin(spec)
    read()
    nights.end(job_id, JobStatus.CANCELLED, answered=("2",))
    nights.put_table("b", 4)
    assert nights.night(spec) == ["1", "3", "4"]
    assert nights.night(spec) == []
    with pytest.raises(SourceError, match=r"a is named twice.*leave one"):
        nights.night(nights.spec(sql=[], parquet=[table, table], s3_only_new=True))


def test_a_watermark_can_be_set_and_forgotten(nights: Nights) -> None:
    nights.add((1, TIMES[0]), (2, TIMES[1]), (3, TIMES[2]))
    assert nights.night() == ["1", "2", "3"]
    assert reset_readings(nights.db, nights.name, "platform:at", TIMES[1]) == 1
    assert nights.night() == ["2", "3"]
    assert reset_readings(nights.db, nights.name) == 1
    assert nights.night() == ["1", "2", "3"]


def test_a_watermark_that_was_reset_while_a_job_read_is_not_overwritten(nights: Nights) -> None:
    nights.add((1, TIMES[0]))
    assert nights.night() == ["1"]
    nights.add((2, TIMES[1]))
    _, read = nights.begin()
    reset_readings(nights.db, nights.name)
    with pytest.raises(StorageUnavailableError, match="meanwhile"):
        read()
    assert nights.night() == ["1", "2"]


def test_a_column_that_is_not_there_is_named(nights: Nights) -> None:
    nights.query = nights.query.replace("at, ", "")
    _, read = nights.begin()
    with pytest.raises(SourceError, match=r"column source\.at does not exist"):
        read()


def test_an_edited_query_keeps_its_watermark_and_two_of_a_kind_are_numbered(nights: Nights) -> None:
    twice = nights.spec().sql * 2
    assert source_identities(twice) == ["platform:at", "platform:at#2"]
    nights.add((1, TIMES[0]))
    assert nights.night() == ["1"]
    nights.query = f"SELECT id, at, upper(body) AS body FROM {nights.name}"
    assert nights.night() == []
