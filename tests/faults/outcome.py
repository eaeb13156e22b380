"""What all kills came to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from faults.checks import Findings
from faults.jobs import STAGES
from faults.kills import Kill
from faults.stack import COMPONENTS


@dataclass(slots=True)
class Outcome:
    """The sum over all jobs.

    Attributes:
        kills: those that landed.
        num_lost: requests, results or lines that are missing.
        num_duplicated: those that are there twice, and requests that were run again.
        num_orphans: engine processes that outlived their flow run.
        num_unended: jobs that came to no end state, or to one without their output.
        sum_holds: whether every job's counters add up.
    """

    kills: list[Kill] = field(default_factory=list)
    num_lost: int = 0
    num_duplicated: int = 0
    num_orphans: int = 0
    num_unended: int = 0
    sum_holds: bool = True

    @property
    def is_clean(self) -> bool:
        """Whether every job so far ended as it must."""
        faults = self.num_lost + self.num_duplicated + self.num_orphans + self.num_unended
        return faults == 0 and self.sum_holds

    def add(self, findings: Findings) -> None:
        """Takes in what was found about a job."""
        self.num_lost += len(findings.lost)
        self.num_duplicated += len(findings.duplicated)
        self.num_unended += not findings.has_ended
        self.sum_holds &= findings.sum_holds

    def as_json(self, seed: int) -> dict[str, Any]:
        """The last line of the output."""
        by_component = Counter(kill.component for kill in self.kills)
        return {
            "kills": len(self.kills),
            "by_component": {component: by_component[component] for component in COMPONENTS},
            "lost": self.num_lost,
            "duplicated": self.num_duplicated,
            "orphans": self.num_orphans,
            "unended": self.num_unended,
            "sum_holds": self.sum_holds,
            "seed": seed,
        }


def kill_table(kills: Sequence[Kill]) -> str:
    """Per component: kills, and the median and the longest time until the job went on."""
    lines = ["| killed | kills | went on after, median | at worst |", "|---|---:|---:|---:|"]
    for component in COMPONENTS:
        times = [kill.recovery_s for kill in kills if kill.component == component]
        if times:
            lines.append(f"| {component} | {len(times)} | {median(times):.1f} s | {max(times):.1f} s |")
    return "\n".join(lines)


def stage_table(kills: Sequence[Kill]) -> str:
    """Kills of each component in each stage."""
    lines = [f"| killed | {' | '.join(STAGES)} |", "|---|" + "---:|" * len(STAGES)]
    counts = Counter((kill.component, kill.stage) for kill in kills)
    for component in COMPONENTS:
        cells = " | ".join(str(counts[component, stage]) for stage in STAGES)
        lines.append(f"| {component} | {cells} |")
    return "\n".join(lines)
