"""The states of a job, which are OpenAI Batch's, and the moves between them."""

from enum import StrEnum


class JobStatus(StrEnum):
    """OpenAI Batch's states."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_end(self) -> bool:
        """Whether a job never leaves this state."""
        return self in (JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED)

    def may_become(self, status: "JobStatus") -> bool:
        """Whether a job of this state may move to another one."""
        return status in _NEXT[self]


_NEXT: dict[JobStatus, tuple[JobStatus, ...]] = {
    JobStatus.VALIDATING: (
        JobStatus.IN_PROGRESS, JobStatus.FINALIZING, JobStatus.FAILED, JobStatus.EXPIRED,
        JobStatus.CANCELLING, JobStatus.CANCELLED,
    ),
    JobStatus.IN_PROGRESS: (
        JobStatus.FINALIZING, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLING, JobStatus.CANCELLED,
    ),
    # A run that died while it exported is followed by one that begins in the front again.
    JobStatus.FINALIZING: (
        JobStatus.IN_PROGRESS, JobStatus.COMPLETED, JobStatus.FAILED, JobStatus.EXPIRED, JobStatus.CANCELLED,
    ),
    JobStatus.CANCELLING: (JobStatus.CANCELLED, JobStatus.FAILED),
    JobStatus.COMPLETED: (),
    JobStatus.FAILED: (),
    JobStatus.EXPIRED: (),
    JobStatus.CANCELLED: (),
}  # fmt: skip
