"""Where a dry run gets its requests from, beside a request file: a job file, or a job in the database."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from blend_core.errors import StorageError
from blend_core.length_priors import LengthPriors, no_priors
from blend_core.request import RequestArrays
from flows.dates import local_date, utc_now
from flows.dry_run.lines import CheckedLine, checked_items
from flows.ingest.only_new import OnlyNew
from flows.ingest.parse import ParseOptions
from flows.ingest.sources import read_sources
from flows.job_spec import BatchJobSpec, dated, parse_job
from flows.wiring import Wiring
from storage.database import Database
from storage.jobs import get_job
from storage.output_lengths import load_length_priors, load_template_priors
from storage.readings import Readings
from storage.request_shards import open_request_shards
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


def priors_of_templates(
    database: Database, model: str, templates: Sequence[str], tell: Callable[[str], None]
) -> LengthPriors:
    """What earlier nights tell of requests by the keys of their templates.

    Nothing where the database has no tables yet or does not answer: the sources alone can be planned, too.
    `tell` hears why.
    """
    try:
        return load_template_priors(database, model, templates)
    except StorageError as error:
        tell(f"earlier nights are not known: {error.message}")
        return no_priors(len(templates))


@dataclass(frozen=True, slots=True)
class KnownJob:
    """A job that has its requests.

    Attributes:
        spec: what was submitted.
        arrays: its valid requests.
        num_bad: its lines that are none.
        recorded: output tokens by `seq` of those that were answered.
        priors: what earlier nights tell of its valid requests.
    """

    spec: BatchJobSpec
    arrays: RequestArrays
    num_bad: int
    recorded: dict[int, int]
    priors: LengthPriors


def known_job(wiring: Wiring, job_id: str, model: str | None) -> KnownJob:
    """Reads a job's requests, the lengths of its answers, and what earlier nights tell of them.

    Args:
        wiring: the parts of this process.
        job_id: the job.
        model: whose earlier nights; None for the job's own.

    Raises:
        StorageError: there is no such job, or its sources have not been read to their end.
    """
    job = get_job(wiring.database, job_id)
    if job.ingested_at is None:
        raise StorageError(
            f"The sources of job {job_id} have not been read; run it, or plan its job file.", job_id=job_id
        )
    with open_request_shards(wiring.database, wiring.objects, job_id) as shards:
        arrays = shards.load_arrays()
    recorded = output_lengths(wiring.database, job_id, arrays.seq.tolist())
    spec = parse_job(job.spec, origin=f"job {job_id}")
    return KnownJob(
        spec=spec,
        arrays=arrays,
        num_bad=job.num_total - len(arrays),
        recorded=recorded,
        priors=load_length_priors(wiring.database, job_id, model or spec.model, arrays.seq),
    )
