"""The tables as SQLAlchemy Core: what the statements of this package are built from.

The migrations create the tables; a test holds these columns equal to the migrated database's. Comments on
tables, columns and views live in the database, where people who write SQL look.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Computed,
    Date,
    DateTime,
    Double,
    Integer,
    MetaData,
    Table,
    Text,
)
from sqlalchemy.dialects.postgresql import ARRAY, JSONB

metadata = MetaData()


def _time(name: str, *, nullable: bool = True) -> Column[object]:
    return Column(name, DateTime(timezone=True), nullable=nullable)


def _count(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def _number(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, Integer, nullable=nullable)


def _real(name: str, *, nullable: bool = False) -> Column[float]:
    return Column(name, Double, nullable=nullable)


def _text(name: str, *, nullable: bool = False, key: bool = False) -> Column[str]:
    return Column(name, Text, nullable=nullable, primary_key=key)


batch_job = Table(
    "batch_job",
    metadata,
    _text("job_id", key=True),
    _text("name"),
    _text("status"),
    _text("model"),
    Column("spec", JSONB, nullable=False),
    _text("idempotency_key", nullable=True),
    _time("created_at", nullable=False),
    _time("in_progress_at"),
    _time("finalizing_at"),
    _time("cancelling_at"),
    _time("finished_at"),
    _time("expires_at"),
    _time("ingested_at"),
    _count("num_total"),
    _count("num_succeeded"),
    _count("num_errored"),
    _count("num_expired"),
    _count("num_cancelled"),
    _text("error_message", nullable=True),
    _text("output_uri", nullable=True),
    _text("error_uri", nullable=True),
    _text("current_run_id", nullable=True),
    _count("fencing_number"),
    _text("table_uri", nullable=True),
    Column("logical_date", Date, nullable=False),
    _text("nightly", nullable=True),
    Column("write_back", JSONB, nullable=True),
    _time("lengths_counted_at"),
    _text("request_index", nullable=True),
)

job_source = Table(
    "job_source",
    metadata,
    _text("job_id", key=True),
    Column("source_index", BigInteger, primary_key=True),
    _text("part"),
    _text("uri"),
    _count("size_bytes", nullable=True),
    _text("etag", nullable=True),
    _count("num_items", nullable=True),
)

nightly = Table(
    "nightly",
    metadata,
    _text("name", key=True),
    _text("cron"),
    _text("timezone"),
    _text("catch_up"),
    Column("spec", JSONB, nullable=False),
    _text("home"),
    _time("since", nullable=False),
    _time("served_at", nullable=False),
)

source_reading = Table(
    "source_reading",
    metadata,
    Column("number", BigInteger, primary_key=True),
    _text("job_name"),
    _text("source"),
    _text("source_uri"),
    _text("job_id"),
    _text("watermark", nullable=True),
    Column("edge_ids", ARRAY(Text), nullable=False),
    _count("num_rows"),
    _time("read_at", nullable=False),
    _text("taken_over_by", nullable=True),
)

source_object = Table(
    "source_object",
    metadata,
    _text("job_name", key=True),
    _text("uri", key=True),
    _text("etag", key=True),
    _text("job_id", key=True),
    _time("read_at", nullable=False),
    _text("taken_over_by", nullable=True),
)

run = Table(
    "run",
    metadata,
    _text("run_id", key=True),
    _text("job_id"),
    _count("fencing_number"),
    _text("status"),
    _text("engine"),
    _text("policy"),
    Column("details", JSONB, nullable=False),
    _time("started_at", nullable=False),
    _time("heartbeat_at", nullable=False),
    _time("lease_expires_at", nullable=False),
    _time("finished_at"),
    _text("error_message", nullable=True),
    Column("engine_deaths", JSONB, nullable=False),
)

engine_suspect = Table(
    "engine_suspect",
    metadata,
    _text("job_id", key=True),
    Column("seq", BigInteger, primary_key=True),
    _count("group_number"),
    _count("num_deaths"),
    _count("num_deaths_alone"),
    _time("last_death_at", nullable=False),
    Column("others_answered", Boolean, nullable=False),
)

plan = Table(
    "plan",
    metadata,
    _text("job_id", key=True),
    Column("revision", Integer, primary_key=True),
    _text("run_id", nullable=True),
    _time("created_at", nullable=False),
    _text("policy"),
    _text("model"),
    _text("device"),
    _number("block_size"),
    _count("num_requests"),
    _count("num_prompt_tokens"),
    _real("estimated_output_tokens"),
    _real("compute_s"),
    _real("memory_s"),
    _real("density"),
    _real("prefix_sharing_best"),
    _real("prefix_sharing_planned"),
    _real("optimum_s"),
    _real("estimated_duration_s", nullable=True),
    _text("plan_uri"),
)

shard = Table(
    "shard",
    metadata,
    _text("job_id", key=True),
    _text("run_id", key=True),
    Column("revision", Integer, primary_key=True),
    Column("shard_index", Integer, primary_key=True),
    _text("status"),
    _number("rank"),
    _count("fencing_number"),
    _count("num_requests"),
    _count("num_ended"),
    _real("estimated_work_s", nullable=True),
    _time("leased_at", nullable=False),
    _time("heartbeat_at", nullable=False),
    _time("lease_expires_at"),
    _time("done_at"),
)

output_length_stat = Table(
    "output_length_stat",
    metadata,
    _text("model", key=True),
    _text("prompt_template", key=True),
    _real("num_samples"),
    _real("sum_output_tokens"),
    _real("sum_output_tokens_sq"),
    _time("updated_at", nullable=False),
    _count("max_tokens"),
    Column("bin_tokens", ARRAY(BigInteger), nullable=False),
    Column("bin_samples", ARRAY(Double), nullable=False),
    _text("job_id"),
)

request = Table(
    "request",
    metadata,
    _text("job_id", key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("is_valid", Boolean, nullable=False),
    _text("custom_id", nullable=True),
    _text("source_uri"),
    _count("source_line"),
    _text("endpoint", nullable=True),
    _text("model", nullable=True),
    _count("num_prompt_tokens", nullable=True),
    _count("max_tokens", nullable=True),
    _text("prompt_excerpt", nullable=True),
    _count("shard_index", nullable=True),
    Column("text_cleaned", Boolean, nullable=False),
    _text("prompt_template", nullable=True),
)

result = Table(
    "result",
    metadata,
    _text("job_id", key=True),
    Column("seq", BigInteger, primary_key=True),
    _text("run_id", nullable=True),
    _count("revision", nullable=True),
    _text("status"),
    _text("output_text", nullable=True),
    _text("finish_reason", nullable=True),
    _count("num_prompt_tokens", nullable=True),
    _count("num_cached_tokens", nullable=True),
    _count("num_output_tokens", nullable=True),
    _text("error_code", nullable=True),
    _text("error_message", nullable=True),
    _time("started_at"),
    _time("finished_at", nullable=False),
    _text("raw_ref", nullable=True),
    Column("text_cleaned", Boolean, nullable=False),
)

batch_metric = Table(
    "batch_metric",
    metadata,
    _text("job_id", key=True),
    _text("run_id", key=True),
    Column("rank", BigInteger, primary_key=True),
    Column("batch_index", BigInteger, primary_key=True),
    _count("revision"),
    _time("started_at", nullable=False),
    _real("duration_s"),
    _real("predicted_s"),
    _count("num_steps"),
    _count("num_prefill_tokens"),
    _count("num_decode_tokens"),
    _count("num_cached_tokens"),
    _count("num_recomputed_tokens"),
    _count("prefill_tokens_sq"),
    _count("decode_kv_tokens"),
    _real("compute_s"),
    _real("memory_s"),
    _real("planned_density", nullable=True),
    Column(
        "measured_density", Double, Computed("compute_s / NULLIF(memory_s, 0)", persisted=True), nullable=True
    ),
    _real("kv_usage"),
    _real("num_running_left"),
    _real("num_running_right"),
    _count("num_preempted"),
    _count("num_finished"),
)
