"""Where a dry run gets its requests from, beside a request file: a job file, or a job in the database."""

from collections.abc import Iterator
from dataclasses import dataclass

from blend_core.errors import StorageError
from blend_core.request import RequestArrays
from flows.dates import local_date, utc_now
from flows.dry_run.lines import CheckedLine, checked_items
from flows.ingest.only_new import OnlyNew
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec, dated, parse_job
from flows.wiring import Wiring
from storage.jobs import get_job
from storage.readings import Readings
from storage.request_shards import RequestShards
from storage.results import output_lengths


def job_file_lines(wiring: Wiring, spec: BatchJobSpec, options: ParseOptions) -> Iterator[CheckedLine]:
    """Every line and row of a job's sources, as the job would read them today.

    Raises:
        ConfigurationError: a template is not valid, or a connection has no URL.
        SourceError: a source cannot be read as given.
    """
    only_new = None
    if spec.reads_only_new:
        only_new = OnlyNew(spec, Readings(wiring.database, spec.name))
    job = dated(spec, local_date(utc_now(), wiring.settings.nightly.timezone))
    return checked_items(read_sources(job, wiring.objects, wiring.source_urls(), options, only_new=only_new))


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job that has its requests.

    Attributes:
        spec: what was submitted.
        arrays: its valid requests.
        num_bad: its lines that are none.
        recorded: output tokens by `seq` of those that were answered.
    """

    spec: BatchJobSpec
    arrays: RequestArrays
    num_bad: int
    recorded: dict[int, int]


def known_job(wiring: Wiring, job_id: str) -> KnownJob:
    """Reads a job's requests and the lengths of its answers.

    Raises:
        StorageError: there is no such job, or its sources have not been read to their end.
    """
    job = get_job(wiring.database, job_id)
    if job.ingested_at is None:
        raise StorageError(
            f"The sources of job {job_id} have not been read; run it, or plan its job file.", job_id=job_id
        )
    with RequestShards(wiring.objects, job_id) as shards:
        arrays = shards.load_arrays()
    recorded = output_lengths(wiring.database, job_id, arrays.seq.tolist())
    return KnownJob(
        spec=parse_job(job.spec, origin=f"job {job_id}"),
        arrays=arrays,
        num_bad=job.num_total - len(arrays),
        recorded=recorded,
    )
