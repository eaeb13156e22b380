"""A job comes further only where no try of it was before."""

from flows.furthest import FurthestProgress
from flows.progress import SilentProgress


def test_only_what_no_try_had_reached_brings_the_job_further() -> None:
    furthest = FurthestProgress(SilentProgress())

    def first() -> None:
        furthest.stage_started("plan", "")
        furthest.stage_finished("plan", "")
        furthest.stage_started("infer", "")
        furthest.counted(5, 10)

    first()
    assert furthest.num_advances == 4
    first()
    furthest.counted(4, 10)
    assert furthest.num_advances == 4
    furthest.counted(6, 10)
    furthest.stage_finished("infer", "")
    assert furthest.num_advances == 6


def test_counts_of_one_stage_are_none_of_another() -> None:
    furthest = FurthestProgress(SilentProgress())
    furthest.stage_started("ingest", "")
    furthest.counted(100, None)
    furthest.stage_started("infer", "")
    before = furthest.num_advances
    furthest.counted(1, 100)
    assert furthest.num_advances == before + 1
