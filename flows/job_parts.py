"""The parts of a job: sources of rows, the table that takes results, options.

`from __future__ import annotations` must stay out of here: Prefect could not build a deployed flow's form.
"""

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from blend_core.engines.vllm.passed_options import KNOWN_OPTIONS, check_passed_options
from blend_core.errors import ConfigurationError, RequestError
from flows.dates import check_placeholders, check_query_placeholders
from flows.ingest.values import read_lora_adapter, read_response_format


def _object_uri(uri: str) -> str:
    bucket, slash, _ = uri.removeprefix("s3://").partition("/")
    if not uri.startswith("s3://") or not bucket or not slash:
        raise PydanticCustomError(
            "s3_address",
            "'{uri}' is not an S3 address; write s3://bucket/key, s3://bucket/folder/, or "
            "s3://bucket/ for all of a bucket (`blend upload` puts a local file there)",
            {"uri": uri},
        )
    return check_placeholders(uri)


# The pattern is for the form alone, which knows no other way to refuse an address at once.
ObjectUri = Annotated[str, AfterValidator(_object_uri), Field(json_schema_extra={"pattern": "^s3://[^/]+/"})]


class Policy(StrEnum):
    """Order and admission of requests."""

    DENSITY_MATCHED = "density_matched"
    DUAL_SCAN = "dual_scan"
    DFS = "dfs"
    FCFS = "fcfs"
    RANDOM = "random"


class EngineName(StrEnum):
    """What computes a job's answers."""

    AUTO = "auto"
    VLLM = "vllm"
    TORCH = "torch"


class DuplicateRule(StrEnum):
    """What a repeated `custom_id` does."""

    ROW = "row"
    JOB = "job"


class CatchUp(StrEnum):
    """What the next night does about missed ones."""

    ALL = "all"
    LATEST = "latest"
    NONE = "none"


class ResultField(StrEnum):
    """What a column of the user's can take of a result."""

    TEXT = "text"
    STATUS = "status"
    ERROR = "error"
    MODEL = "model"
    JOB_ID = "job_id"
    FINISHED_AT = "finished_at"


class OutputFormat(StrEnum):
    """What a job's answers and errors are exported as."""

    JSONL = "jsonl"
    PARQUET = "parquet"


class JobPart(BaseModel):
    """Fields of which none may be unknown."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def _as_in_a_request(read: Callable[[str, object], object], name: str, value: object) -> None:
    """Checks a value by the rule of a request's field of that name."""
    try:
        read(name, value)
    except RequestError as error:
        raise PydanticCustomError("request_field", "{message}", {"message": str(error).rstrip(".")}) from None


class RowSource(JobPart):
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
    response_format: dict[str, Any] | None = Field(
        None,
        title="Response format",
        description="as in a request: an object whose `type` is `text`, `json_object` or `json_schema` (with "
        "`json_schema.schema`); JSON needs the engine `vllm`",
    )
    lora_adapter: str | None = Field(
        None,
        title="LoRA adapter",
        description="the name of one of `options.vllm.lora_adapters`; needs the engine `vllm`",
    )

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None:
            _as_in_a_request(read_response_format, "response_format", value)
        return value

    @field_validator("lora_adapter")
    @classmethod
    def _named_adapter(cls, value: str | None) -> str | None:
        if value is not None:
            _as_in_a_request(read_lora_adapter, "lora_adapter", value)
        return value


class SqlSource(RowSource):
    """Rows of a read-only query, each filled into a prompt template."""

    query: str = Field(description="one SELECT; it runs in a read-only transaction", min_length=1)
    connection: str = Field(
        "platform",
        description="`platform` (read by the login `blend_reader`), "
        "or NAME of a BLEND_SOURCES__NAME variable that holds the URL",
    )
    watermark_column: str | None = Field(
        None,
        title="Watermark column",
        description="read only rows that are new by this column (a time or a growing number), "
        "remembered under the job's name",
        min_length=1,
    )

    @field_validator("query")
    @classmethod
    def _query_placeholders(cls, value: str) -> str:
        return check_query_placeholders(value)

    @model_validator(mode="after")
    def _new_rows_have_ids(self) -> "SqlSource":
        if self.watermark_column is not None and not self.id_column:
            raise PydanticCustomError(
                "no_ids",
                "`watermark_column` needs an `id_column`: rows of equal watermarks are told apart by it",
            )
        return self


class ParquetSource(RowSource):
    """Rows of Parquet objects, each filled into a prompt template."""

    uri: ObjectUri = Field(
        title="S3 address",
        description="Parquet objects, addressed as under `s3`; names that begin with `_` or `.` are left out "
        "of a folder or pattern",
    )


class WriteBack(JobPart):
    """Results upserted into a table of the user's, after the export."""

    connection: str = Field(description="NAME of a BLEND_TARGETS__NAME variable that holds the Postgres URL")
    table: str = Field(description="`table` or `schema.table`; it must be there", min_length=1)
    key_column: str = Field(description="unique column that takes `custom_id`", min_length=1)
    columns: dict[ResultField, Annotated[str, Field(min_length=1)]] = Field(
        default_factory=lambda: {field: field.value for field in ResultField},
        description="which column takes what: `text`, `status`, `error`, `model`, `job_id`, `finished_at`; "
        "all six under their own names where left out. With neither `status` nor `error` only answers are "
        "written",
        min_length=1,
    )

    @field_validator("table")
    @classmethod
    def _table_placeholders(cls, value: str) -> str:
        return check_placeholders(value)

    @model_validator(mode="after")
    def _each_column_once(self) -> "WriteBack":
        named = [self.key_column, *self.columns.values()]
        twice = [name for name in named if named.count(name) > 1]
        if twice:
            raise PydanticCustomError(
                "column_twice",
                "the column '{column}' is named twice; each column takes one thing",
                {"column": twice[0]},
            )
        return self


class JobOptions(JobPart):
    """Choices with a sound default."""

    policy: Policy = Field(
        Policy.DENSITY_MATCHED,
        description="order and admission of requests: `density_matched` runs compute-intensive beside "
        "memory-intensive ones and learns how long answers are, `dual_scan` does so by plan, "
        "`dfs` goes by shared prefixes, `fcfs` takes them as they come, `random` shuffles them, to compare "
        "with",
    )
    engine: EngineName = Field(
        EngineName.AUTO,
        description="`vllm`, `torch`, or `auto`: as BLEND_ENGINE__NAME says, which is vLLM where it is there",
    )
    vllm: dict[str, Any] = Field(
        {},
        title="vLLM options",
        description="options of vLLM's own by its names, over those of the machine, and `lora_adapters` "
        '(docs/vllm.md); in the form as JSON: `{"max_model_len": 4096}`',
        # For Prefect's form alone: the form makes a field of each of `properties`, and drops `propertyNames`
        # anywhere but in `allOf`.
        json_schema_extra={"allOf": [{"propertyNames": {"enum": [*sorted(KNOWN_OPTIONS)]}}]},
    )
    chat_template_kwargs: dict[str, Any] = Field(
        {},
        title="Chat template arguments",
        description="variables of the model's chat template, for requests that do not set them; in the form "
        'as JSON: `{"enable_thinking": false}`',
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
    ranks: Annotated[int, Field(ge=1, le=64)] | None = Field(
        None,
        description="model replicas that share the job, each with an engine and a KV cache of its own; one "
        "per GPU if left out, 1 on a CPU",
    )
    request_timeout_s: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None,
        description="seconds from its first step in which a request must end, else it is an error row "
        "`timed_out`; empty for no limit",
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        0, description="seed of sampling and of the choice of length samples, 0 or more"
    )

    @field_validator("vllm")
    @classmethod
    def _known_options(cls, value: dict[str, Any]) -> dict[str, Any]:
        try:
            check_passed_options(value)
        except ConfigurationError as error:
            raise PydanticCustomError(
                "vllm_option", "{message}", {"message": str(error).rstrip(".")}
            ) from None
        return value
