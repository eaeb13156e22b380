"""The stages of a run as plain functions over a `JobContext`, in their order."""

from flows.stages.context import JobContext
from flows.stages.export import export_job
from flows.stages.infer import infer_job
from flows.stages.ingest import ingest_job
from flows.stages.plan import plan_job
from flows.stages.report import report_job
from flows.stages.write_back import write_back_job

__all__ = ["JobContext", "export_job", "infer_job", "ingest_job", "plan_job", "report_job", "write_back_job"]
