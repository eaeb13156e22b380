"""How far a plan has been worked off, and what density it planned for that point."""

from blend_core.plan import Plan, planned_density_at


class PlanProgress:
    """Share of finished work of one plan, work being `compute_s + memory_s` as in `Plan.progress`.

    Requests of the plan that had ended before this run count as finished from the start.
    """

    __slots__ = ("_done_s", "_open", "_plan", "_total_s")

    def __init__(self, plan: Plan, open_part: Plan) -> None:
        """Takes the whole plan and the part of it that is still to run."""
        self._plan = plan
        self._total_s = float((plan.compute_s + plan.memory_s).sum())
        work_s = open_part.compute_s + open_part.memory_s
        self._open = dict(zip(open_part.seq.tolist(), work_s.tolist(), strict=True))
        self._done_s = self._total_s - float(work_s.sum())

    def ended(self, seq: int) -> None:
        """A request ended, well or not; one that the plan does not name changes nothing."""
        self._done_s += self._open.pop(seq, 0.0)

    @property
    def share(self) -> float:
        """Share of finished work, 0 to 1."""
        return min(max(self._done_s / self._total_s, 0.0), 1.0) if self._total_s > 0 else 1.0

    @property
    def planned_density(self) -> float | None:
        """The plan's simulated density at this share; None where nothing was simulated."""
        return planned_density_at(self._plan, self.share)
