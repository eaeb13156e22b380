"""What a user submits: one pydantic model for the Prefect form, the YAML file and the command line.

`from __future__ import annotations` must stay out of here: Prefect could not build a deployed flow's form.
"""

from datetime import date
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from blend_core.errors import ConfigurationError
from flows.dates import check_placeholders, fill_query, fill_text
from flows.job_parts import (
    CatchUp,
    JobOptions,
    JobPart,
    ObjectUri,
    OutputFormat,
    ParquetSource,
    SqlSource,
    WriteBack,
)

JOB_FILE_SUFFIXES = (".yaml", ".yml")
MAX_JOB_FILE_BYTES = 1 << 20
UNNAMED = "batch"


class BatchJobSpec(JobPart):
    """A batch job: sources, a model, options and a completion window."""

    name: str = Field(
        UNNAMED,
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
    s3_only_new: bool = Field(
        False,
        title="Only new objects",
        description="of `s3` and `parquet` read only objects (by address and version) that no job of this "
        "name has read",
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
    write_back: WriteBack | None = Field(
        None,
        title="Write back",
        description="upsert the results into a table of yours, after the export",
    )
    catch_up: CatchUp = Field(
        CatchUp.NONE,
        title="Catch up",
        description="as the nightly job: which missed nights the next one runs before its own: `all`, only "
        "the `latest`, or `none`, which only reports them",
    )

    @field_validator("name")
    @classmethod
    def _name_placeholders(cls, value: str) -> str:
        return check_placeholders(value)

    @model_validator(mode="after")
    def _some_source(self) -> "BatchJobSpec":
        if not self.s3 and not self.parquet and not self.sql:
            raise PydanticCustomError(
                "no_source", "the job has no source; give `s3` addresses, `parquet` tables or `sql` queries"
            )
        return self

    @model_validator(mode="after")
    def _what_remembers_has_a_name(self) -> "BatchJobSpec":
        if self.reads_only_new and self.name == UNNAMED:
            raise PydanticCustomError(
                "no_name", "what was read is remembered under the job's `name`; give it one of its own"
            )
        return self

    @property
    def reads_only_new(self) -> bool:
        """Whether what earlier jobs of this name have read is left out."""
        return self.s3_only_new or any(source.watermark_column is not None for source in self.sql)


def dated(spec: BatchJobSpec, logical_date: date) -> BatchJobSpec:
    """The job of one day: `{logical_date}` filled in S3 addresses, queries, name and table.

    In SQL it becomes a literal, so that it cannot be anything else.
    """
    write_back = spec.write_back
    if write_back is not None:
        write_back = write_back.model_copy(update={"table": fill_text(write_back.table, logical_date)})
    return spec.model_copy(
        update={
            "name": fill_text(spec.name, logical_date),
            "s3": [fill_text(uri, logical_date) for uri in spec.s3],
            "parquet": [
                table.model_copy(update={"uri": fill_text(table.uri, logical_date)}) for table in spec.parquet
            ],
            "sql": [
                source.model_copy(update={"query": fill_query(source.query, logical_date)})
                for source in spec.sql
            ],
            "write_back": write_back,
        }
    )


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
    "dict_type": "must be names and their values (`name: value`)",
    "model_type": "must be fields and their values (`name: value`)",
}


def _fault(found: ErrorDetails) -> str:
    place = ".".join(str(part) for part in found["loc"]) or "job"
    said = found["msg"].replace("Input should be", "must be")
    return f"{place}: {_PLAIN_FAULTS.get(found['type'], said)}"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
