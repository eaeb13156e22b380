"""What a user submits: one pydantic model for the Prefect form, the YAML file and the command line.

`from __future__ import annotations` must stay out of here: Prefect could not build a deployed flow's form.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from blend_core.errors import ConfigurationError

MAX_JOB_FILE_BYTES = 1 << 20


def _object_uri(uri: str) -> str:
    bucket, slash, _ = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket or not slash:
        raise PydanticCustomError(
            "s3_address",
            "'{uri}' is not an S3 address; write s3://bucket/key, s3://bucket/folder/, or "
            "s3://bucket/ for all of a bucket (`blend upload` puts a local file there)",
            {"uri": uri},
        )
    return uri


# The pattern is for the form alone, which knows no other way to refuse an address at once.
ObjectUri = Annotated[str, AfterValidator(_object_uri), Field(json_schema_extra={"pattern": "^s3://[^/]+/"})]


class Policy(StrEnum):
    """Order and admission of requests."""

    DENSITY_MATCHED = "density_matched"
    DUAL_SCAN = "dual_scan"
    DFS = "dfs"
    FCFS = "fcfs"
    RANDOM = "random"


class DuplicateRule(StrEnum):
    """What a repeated `custom_id` does."""

    ROW = "row"
    JOB = "job"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RowSource(_Part):
    """Rows of which each is filled into a prompt template."""

    prompt: str = Field(
        description="Jinja template of the user's message over the row's columns: `Summarise: {{ body }}`",
        min_length=1,
    )
    system: str | None = Field(None, description="Jinja template of the system message")
    id_column: str | None = Field(
        "id", title="Id column", description="column that becomes `custom_id`; empty for none"
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None,
        title="Longest answer",
        description="longest answer in tokens, 1 or more; the job's default if not given",
    )
    temperature: Annotated[float, Field(ge=0, le=2)] = Field(0.0, description="0 (greedy) to 2")


class SqlSource(RowSource):
    """Rows of a read-only query, each filled into a prompt template."""

    query: str = Field(description="one SELECT; it runs in a read-only transaction", min_length=1)
    connection: str = Field(
        "platform",
        description="`platform` (read by the login `blend_reader`), "
        "or NAME of a BLEND_SOURCES__NAME variable that holds the URL",
    )


class ParquetSource(RowSource):
    """Rows of Parquet objects, each filled into a prompt template."""

    uri: ObjectUri = Field(
        title="S3 address",
        description="Parquet objects, addressed as under `s3`; names that begin with `_` or `.` are left out "
        "of a folder or pattern",
    )


class OutputFormat(StrEnum):
    """What a job's answers and errors are exported as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class JobOptions(_Part):
    """Choices with a sound default."""

    policy: Policy = Field(
        Policy.DENSITY_MATCHED,
        description="order and admission of requests: `density_matched` runs compute-intensive beside "
        "memory-intensive ones and learns how long answers are, `dual_scan` does so by plan, "
        "`dfs` goes by shared prefixes, `fcfs` takes them as they come",
    )
    default_max_tokens: Annotated[int, Field(ge=1)] = Field(
        256,
        title="Longest answer",
        description="longest answer in tokens, 1 or more, of a request that does not say `max_tokens`",
    )
    on_duplicate: DuplicateRule = Field(
        DuplicateRule.ROW,
        title="Repeated custom_id",
        description="a repeated `custom_id` fails its `row` or the whole `job`",
    )
    strict_model: bool = Field(
        False,
        title="Strict model",
        description="a request that asks for another model becomes an error row",
    )
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="seconds from its first step in which a request must end, else it is an error row "
        "`timed_out`; empty for no limit",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of sampling and of the choice of length samples, 0 or more"
    )


class BatchJobSpec(_Part):
    """A batch job: sources, a model, options and a completion window."""

    name: str = Field(
        "batch",
        description="name of the job in lists and reports, and of its flow run",
        min_length=1,
        max_length=200,
    )
    model: str = Field("smollm2-135m", description="model by name (`blend model list`)", min_length=1)
    s3: list[ObjectUri] = Field(
        default_factory=list,
        title="S3 addresses",
        description="objects in OpenAI Batch format, JSONL (plain, gzip or zstd) or Parquet: an exact "
        "`s3://bucket/key`, all of a folder `s3://bucket/folder/` (or bucket `s3://bucket/`), or all that "
        "begin so, `s3://bucket/day-*`",
    )
    parquet: list[ParquetSource] = Field(
        default_factory=list, title="Parquet tables", description="tables in S3, each row one request"
    )
    sql: list[SqlSource] = Field(
        default_factory=list,
        title="SQL queries",
        description="Postgres queries, beside S3 addresses or in their place",
    )
    outputs: list[OutputFormat] = Field(
        default_factory=lambda: [OutputFormat.JSONL, OutputFormat.PARQUET],
        description="`jsonl` (OpenAI Batch: answers and errors apart) and `parquet` (one table of all "
        "requests); both if left out",
        min_length=1,
    )
    completion_window_hours: Annotated[float, Field(gt=0, le=8760, allow_inf_nan=False)] = Field(
        24.0,
        title="Completion window in hours",
        description="what has no result by then becomes `expired`; more than 0, at most a year (8760)",
    )
    options: JobOptions = Field(default_factory=JobOptions, description="choices with a sound default")

    @model_validator(mode="after")
    def _some_source(self) -> "BatchJobSpec":
        if not self.s3 and not self.parquet and not self.sql:
            raise PydanticCustomError(
                "no_source", "the job has no source; give `s3` addresses, `parquet` tables or `sql` queries"
            )
        return self


def load_job_file(path: Path) -> BatchJobSpec:
    """Reads a job file (YAML or JSON).

    Raises:
        ConfigurationError: the file cannot be read or a field is wrong; names the field.
    """
    try:
        with path.open("rb") as file:
            text = file.read(MAX_JOB_FILE_BYTES + 1)
        if len(text) > MAX_JOB_FILE_BYTES:
            raise ConfigurationError(
                f"Job file {path} is larger than {MAX_JOB_FILE_BYTES >> 20} MiB; requests belong into S3."
            )
        content = yaml.safe_load(text.decode())
    except FileNotFoundError:
        raise ConfigurationError(f"Job file {path} does not exist.") from None
    except RecursionError:
        raise ConfigurationError(f"Job file {path} is nested too deeply; a job has few levels.") from None
    # A ValueError comes of numbers and dates that there are not.
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigurationError(f"Job file {path} cannot be read as YAML: {_first_line(error)}.") from None
    return parse_job(content, origin=str(path))


def parse_job(content: object, origin: str) -> BatchJobSpec:
    """Checks a job given as plain data; `origin` names it in errors.

    Raises:
        ConfigurationError: names every field that is wrong.
    """
    try:
        return BatchJobSpec.model_validate(content)
    except ValidationError as error:
        faults = "; ".join(_fault(found) for found in error.errors(include_input=False, include_url=False))
        raise ConfigurationError(f"{origin}: {faults}.") from None


_PLAIN_FAULTS = {
    "extra_forbidden": "there is no such field; correct its name or leave it out",
    "missing": "is missing",
    "string_type": "must be a text",
    "list_type": "must be a list (`[…]`, or lines that begin with `-`)",
    "model_type": "must be fields and their values (`name: value`)",
}


def _fault(found: ErrorDetails) -> str:
    place = ".".join(str(part) for part in found["loc"]) or "job"
    said = found["msg"].replace("Input should be", "must be")
    return f"{place}: {_PLAIN_FAULTS.get(found['type'], said)}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
