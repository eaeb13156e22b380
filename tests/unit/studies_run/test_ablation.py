"""The study that leaves out one idea of density-matched admission after another."""

from flows.bench.ablation import AblationRun, AblationTask, run_ablation_task
from flows.bench.study_tables import ablation_table


def test_every_variant_runs_a_workload_to_its_end():
    fractions = run_ablation_task(AblationTask(target=1, preset=False, seed=0, hours=0.1, traces=None))
    assert {"dfs", "dfs with our admission", "density_matched", "no idea"} < set(fractions)
    assert len([name for name in fractions if name.startswith("without")]) == 7
    assert all(0 < fraction <= 1.02 for fraction in fractions.values())
    # A variant that does nothing else than the whole policy would have its very figure.
    left_out = [fraction for name, fraction in fractions.items() if name.startswith("without")]
    assert any(fraction != fractions["density_matched"] for fraction in left_out)


def test_the_table_has_a_row_per_variant():
    run = AblationRun("generated", 1.0, (0,), {"dfs": {"preset": (0.7, 0.6), "hidden": (0.5, 0.4)}})
    headers, rows = ablation_table(run)
    assert rows == [("dfs", "0.700", "0.600", "0.500", "0.400")]
    assert len(headers) == len(rows[0])
