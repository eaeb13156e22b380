"""How a job stands that has not ended: who runs it, or why nothing does and what continues it."""

from typing import TYPE_CHECKING, Any

from blend_core.wording import count_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from storage.lost_runs import LiveRun, StoppedJob
    from storage.suspects import EngineDeath


def continuation(job_id: str) -> str:
    """What continues a job, for the end of a line: nothing follows it, so that it can be copied."""
    return f"continue it with: blend run --job-id {job_id}"


def deaths_line(deaths: "Sequence[EngineDeath]", run_error: str | None) -> str:
    """How often engines of a job died; with the last reason unless the run's error, which follows, has it."""
    last = deaths[-1]
    how_often = "once" if len(deaths) == 1 else f"{len(deaths)} times"
    told = f"Its engine died {how_often}, last at {last.died_at:%H:%M:%S}"
    return f"{told}." if run_error is not None and last.reason in run_error else f"{told}: {last.reason}"


def stopped_line(job: "StoppedJob") -> str:
    """That nothing runs a job, in a list of jobs, and what continues it or tells why it cannot be."""
    if job.has_failed:
        what = f"its latest run failed; see why, and what to do, with: blend status {job.job_id}"
    else:
        what = continuation(job.job_id)
    return f"Nothing runs job {job.job_id} ({job.name}, {job.status}); {what}"


def stopped_list(jobs: "Sequence[StoppedJob]", most: int) -> list[str]:
    """The lines of the `most` latest of these jobs, the oldest first, behind a count of those before them."""
    by_age = sorted(jobs, key=lambda job: job.job_id)
    lines = [stopped_line(job) for job in by_age[-most:]]
    num_older = len(by_age) - len(lines)
    if num_older:
        jobs_text = count_text(num_older, "older job")
        lines.insert(0, f"Nothing runs {jobs_text} either; `blend status --json` lists all (stopped_jobs)")
    return lines


def stopped_lines(job_id: str, run_error: str | None, *, was_told_to_end: bool) -> tuple[str, ...]:
    """Why nothing runs a job, where that is known, and what continues it, each said once.

    Args:
        job_id: the job.
        run_error: why its latest run ended.
        was_told_to_end: whether its run was interrupted; its message is not shown, since it says the same.
    """
    again = continuation(job_id)
    if was_told_to_end:
        return (f"Nothing runs it: its latest run was told to end; {again}",)
    if run_error is None:
        return (f"Nothing runs it; {again}",)
    told = f"Its latest run failed: {run_error}"
    if "`blend cancel" in run_error:
        # What is wrong may be the job's own, which continuing it does not mend: the error says what to do.
        return (told, "Nothing runs it.")
    return (told, f"Nothing runs it; once that is mended, {again}")


def unbegun_line() -> str:
    """That a job waits to be begun."""
    return "No run has begun it yet; of submitted jobs one runs at a time, in the order of their submission."


def waiting_line(live: "LiveRun") -> str | None:
    """What the run of a job waits for; None where it does not wait."""
    from storage.runs import WAITS_FOR

    return live.details.get(WAITS_FOR) or None


def holder_json(live: "LiveRun") -> dict[str, Any]:
    """Who runs a job, for `--json`."""
    from flows.lease_holder import holder_text, is_gone

    return {
        "run_id": live.run_id,
        "process": holder_text(live.details),
        "since": live.started_at.isoformat(),
        "heartbeat_age_s": round(live.heartbeat_age_s, 1),
        "is_gone": is_gone(live.details) or live.lease_left_s <= 0,
        "waits_for": waiting_line(live),
    }


def holder_line(live: "LiveRun") -> str:
    """Who runs a job and how old its last sign of life is; what to do where it is dead."""
    from flows.lease_holder import holder_text, is_gone

    holder, again = holder_text(live.details), continuation(live.job_id)
    age = f"last sign of life {live.heartbeat_age_s:.0f} s ago"
    if is_gone(live.details):
        return f"Nothing runs it: {holder} is gone, {age}; {again}"
    if live.lease_left_s <= 0:
        return f"Nothing runs it: {holder} counts as dead, {age}; {again}"
    return f"Run by {holder} since {live.started_at:%Y-%m-%d %H:%M:%S}, {age}"
