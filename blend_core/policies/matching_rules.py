"""The ideas of density-matched admission, each of which a study can leave out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MatchingRules:
    """Which ideas are in force: all of them, but in the study that asks what each is worth.

    Attributes:
        looks_ahead: a right request starts where KV has room up to its end; else where it has room now.
        keeps_deviations: KV ahead leaves room for answers that turn out longer than expected.
        fills_gaps: a known shorter answer may go before its turn.
        paces: the left side is spread evenly over the steps that are left; else it takes all it can get.
        follows_kv: a step computes more where it reads more KV, and less where it reads less.
        learns: lengths are learned in mid-run; else once, from those that ended when the plan is revised.
        counts_running: answers still running count when lengths are learned; else only those that ended.
    """

    looks_ahead: bool = True
    keeps_deviations: bool = True
    fills_gaps: bool = True
    paces: bool = True
    follows_kv: bool = True
    learns: bool = True
    counts_running: bool = True
