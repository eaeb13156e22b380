"""The study that leaves out one idea of density-matched admission after another."""

from blend_core.studies.run_ends import RunEnds
from flows.bench.ablation import ENDS_OF, AblationRun, AblationTask, run_ablation_task
from flows.bench.study_tables import ablation_table, ends_table
from flows.bench.study_tasks import study_target

ENDS = {name: {length_set: RunEnds(61.0, 122.4) for length_set in ("preset", "hidden")} for name in ENDS_OF}


def test_every_variant_runs_a_workload_to_its_end():
    fractions, ends, least_s = run_ablation_task(
        AblationTask(trace=1, preset=False, seed=0, hours=0.1, traces=None, target=study_target())
    )
    assert {"dfs", "dfs with our admission", "density_matched", "no idea"} < set(fractions)
    assert len([name for name in fractions if name.startswith("without")]) == 7
    assert all(0 < fraction <= 1.02 for fraction in fractions.values())
    assert set(ends) == set(ENDS_OF)
    assert 0 < least_s < min(end.start_s for end in ends.values())
    # KV never fills in so short a run; what has to do with that is seen in the policy's own tests.
    for idea in ("paces", "follows_kv", "learns", "counts_running"):
        assert fractions[f"without {idea}"] != fractions["density_matched"]


def test_tables_have_a_row_per_variant():
    fractions = {"dfs": {"preset": (0.7, 0.6), "hidden": (0.5, 0.4)}}
    run = AblationRun("generated", 1.0, (0,), fractions, ENDS, 24.7)
    headers, rows = ablation_table(run)
    assert rows == [("dfs", "0.700", "0.600", "0.500", "0.400")]
    assert len(headers) == len(rows[0])
    headers, rows = ends_table(run)
    assert rows[0] == ("dfs", "61", "122", "61", "122")
    assert rows[-1][1:] == ("25", "0", "25", "0")
    assert all(len(headers) == len(row) for row in rows)
    assert run.as_json()["ends"]["dual_scan"]["hidden"] == {"start_s": 61.0, "end_s": 122.4}
