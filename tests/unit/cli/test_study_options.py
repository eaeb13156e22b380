"""What `blend bench` refuses before its work, which may take hours, begins."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.bench.study_tasks import study_target
from flows.cli.study_options import AskedTarget, asked_target
from flows.cli.study_output import Study, StudySize

STUDIES = ("policy", "paper", "grid", "traces", "ablation", "ranks")


@pytest.mark.parametrize("study", [*STUDIES, "simulate", "plan"])
def test_a_seed_below_0_is_wrong_usage(blend: Callable[..., Any], study: str) -> None:
    file = ("tonight.parquet",) if study == "simulate" else ()
    ran = blend("bench", study, *file, "--seed", "-1")
    assert ran.status == 2
    assert "--seed" in ran.stderr
    assert "Unexpected" not in ran.stderr


@pytest.mark.parametrize("hours", ["nan", "inf", "-1"])
def test_hours_are_a_number_of_hours(blend: Callable[..., Any], hours: str) -> None:
    ran = blend("bench", "paper", "--hours", hours)
    assert ran.status == 2
    assert "--hours" in ran.stderr


@pytest.mark.parametrize("study", ["policy", "paper", "grid", "traces", "ranks", "simulate"])
def test_plots_that_have_no_place_are_refused_before_the_work(
    blend: Callable[..., Any], tmp_path: Path, study: str
) -> None:
    (tmp_path / "taken").write_text("a file")
    file = ("tonight.parquet",) if study == "simulate" else ()
    ran = blend("bench", study, *file, "--plots", "taken")
    assert ran.status == 2
    assert ran.stderr == (
        "blend: Plots cannot be written to taken (File exists); let --plots name a folder of yours.\n"
    )


@pytest.mark.parametrize("study", STUDIES)
def test_tables_that_have_no_place_are_refused_before_the_work(
    blend: Callable[..., Any], tmp_path: Path, study: str
) -> None:
    assert "is no text file" in blend("bench", study, "--write-docs", "nowhere.md").stderr
    (tmp_path / "studies.md").write_text("no marks")
    ran = blend("bench", study, "--write-docs", "studies.md")
    assert ran.status == 2
    assert ran.stderr.startswith(f"blend: studies.md has no lines <!-- {study} begins -->")


TARGETED = ("paper", "grid", "traces", "ablation", "ranks", "simulate")


@pytest.mark.parametrize("study", TARGETED)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--model", "gpt-none"), "There is no model 'gpt-none'; name a preset"),
        (("--device", "abacus"), "There is no device profile 'abacus'; use one of a100-80g"),
        (
            ("--model", "llama-3.1-70b", "--tensor-parallel", "2"),
            "llama-3.1-70b does not fit 2 devices of a100-80g; name a larger one, or more of them.",
        ),
    ],
)
def test_what_cannot_be_simulated_is_refused_as_by_a_plan(
    blend: Callable[..., Any], study: str, options: tuple[str, ...], sentence: str
) -> None:
    file = ("tonight.parquet",) if study == "simulate" else ()
    ran = blend("bench", study, *file, *options)
    assert ran.status == 2
    assert ran.stderr.startswith(f"blend: {sentence}")
    assert ran.stderr.count("\n") == 1


def test_a_study_names_the_model_and_devices_that_were_asked_for() -> None:
    asked = asked_target("llama-3.1-70b", None, 8)
    study = Study.of("paper", StudySize(5, 5.0), 3, 1, 1.0, asked, is_quick=False)
    assert study.command == (
        "blend bench paper --hours 1 --seed 3 --seeds 1 --model llama-3.1-70b --tensor-parallel 8"
    )
    assert asked.text == "llama-3.1-70b on a100-80g-x8"
    assert study.as_json({"data": "real"}) == {
        "model": "llama-3.1-70b",
        "device": "a100-80g-x8",
        "tensor_parallel": 8,
        "hours": 1.0,
        "data": "real",
    }


def test_a_study_in_small_says_so_where_it_says_how_it_was_measured() -> None:
    asked = asked_target(None, None, None)
    study = Study.of("grid", StudySize(1, 0.25), 0, None, None, asked, is_quick=True)
    assert study.command == "blend bench grid --quick --hours 0.25 --seed 0 --seeds 1"


def test_without_options_studies_are_of_what_the_published_figures_are_of() -> None:
    assert asked_target(None, None, None) == AskedTarget(study_target(), 1, "")


def test_a_profile_that_has_no_place_is_refused_before_it_is_measured(blend: Callable[..., Any]) -> None:
    for name in ("nowhere/cpu.toml", "cpu.txt"):
        ran = blend("profile", "--save", name)
        assert ran.status == 2
        assert "Measuring" not in ran.stderr
