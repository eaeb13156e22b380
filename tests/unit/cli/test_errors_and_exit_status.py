"""One sentence on stderr, and an exit status that scripts can rely on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_a_wrong_file_is_a_usage_error_in_one_sentence(blend: Callable[..., Any]) -> None:
    ran = blend("validate", "nowhere.jsonl")
    assert ran.status == 2
    assert ran.stdout == ""
    assert ran.stderr.count("\n") == 1
    assert "nowhere.jsonl" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_unknown_command_is_a_usage_error(blend: Callable[..., Any]) -> None:
    assert blend("fly").status == 2


def test_a_job_without_sources_is_a_usage_error(blend: Callable[..., Any]) -> None:
    ran = blend("run", "--model", "smollm2-135m")
    assert ran.status == 2
    assert "no source" in ran.stderr


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_local_file_as_an_address_is_told_to_be_uploaded(
    blend: Callable[..., Any], tmp_path: Path, command: str
) -> None:
    (tmp_path / "in.jsonl").write_text("{}\n")
    ran = blend(command, "--s3", "in.jsonl")
    assert ran.status == 2
    assert "`blend upload in.jsonl`" in ran.stderr


@pytest.mark.parametrize("name", ["in.jsonl", "in.json"])
def test_a_request_file_in_place_of_a_job_file_is_recognised(
    blend: Callable[..., Any], tmp_path: Path, name: str
) -> None:
    line = '{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    (tmp_path / name).write_text(2 * line)
    ran = blend("run", name)
    assert ran.status == 2
    assert "request file" in ran.stderr
    assert f"`blend upload {name}`" in ran.stderr


def test_uploading_what_is_not_there_starts_nothing(blend: Callable[..., Any], tmp_path: Path) -> None:
    ran = blend("upload", "gone.jsonl")
    assert ran.status == 2
    assert "gone.jsonl" in ran.stderr
    assert not (tmp_path / "home").exists()


def test_a_query_without_a_template_is_a_usage_error(blend: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "q.sql").write_text("SELECT 1")
    ran = blend("run", "--sql", "q.sql")
    assert ran.status == 2
    assert "--prompt" in ran.stderr


@pytest.mark.parametrize("command", ["run", "submit"])
def test_a_job_that_is_continued_takes_no_options(blend: Callable[..., Any], command: str) -> None:
    ran = blend(command, "--job-id", "job_x", "--policy", "dfs")
    assert ran.status == 2
    assert "--job-id" in ran.stderr


def test_a_wrong_variable_is_named_without_its_value(
    blend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLEND_ENGINE__KV_GIB", "plenty")
    ran = blend("model", "list")
    assert ran.status == 2
    assert "BLEND_ENGINE__KV_GIB" in ran.stderr
    assert "plenty" not in ran.stderr


@pytest.mark.parametrize("name", ["BLEND_ENGINE__NOPE", "BLEND_ENGINE__KV_GB", "BLEND_DATABASE__URI"])
def test_a_mistyped_variable_is_named(
    blend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, "8")
    ran = blend("model", "list")
    assert ran.status == 2
    assert f"{name} is no setting" in ran.stderr


def test_reading_without_services_says_how_to_start_them(blend: Callable[..., Any]) -> None:
    ran = blend("results", "job_x")
    assert ran.status == 1
    assert "blend up" in ran.stderr


def test_debug_shows_where_an_error_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from blend_core.errors import ConfigurationError
    from flows.cli import main

    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError):
        main(["--debug", "validate", "nowhere.jsonl"])


@pytest.mark.parametrize(("option", "value"), [("--rounds", "3"), ("--versus", "run-batch")])
def test_what_only_the_comparison_of_vllm_takes_is_refused_without_it(
    blend: Callable[..., Any], option: str, value: str
) -> None:
    ran = blend("bench", "engine", option, value)
    assert ran.status == 2
    assert f"{option} is for --engine vllm; give that, too, or leave {option} out." in ran.stderr


def test_the_version_is_told(blend: Callable[..., Any]) -> None:
    ran = blend("--version")
    assert ran.status == 0
    assert ran.stdout.startswith("blend 0.")


def test_an_interrupt_while_commands_are_imported_ends_without_a_word() -> None:
    # What a signal does is raised at some step behind it, perhaps where an exception is only told; so it is
    # raised here.
    code = (
        "import sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from flows.cli import main\n"
        "main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_stopping_what_does_not_run_says_so(blend: Callable[..., Any], tmp_path: Path) -> None:
    ran = blend("down")
    assert ran.status == 0
    assert f"Nothing was running in {tmp_path / 'home'}" in ran.stderr


def test_a_relative_state_folder_is_named_in_full(
    blend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("BLEND_HOME", "here")
    assert f"{tmp_path / 'here'} " in blend("results", "job_x").stderr
    assert json.loads(blend("status", "--json").stdout)["home"] == str(tmp_path / "here")


def test_no_model_yet_says_how_to_add_one(blend: Callable[..., Any]) -> None:
    ran = blend("model", "list")
    assert ran.status == 0
    assert "blend model add" in ran.stdout


@pytest.mark.parametrize(("command", "status", "type_"), [
    (("results", "job_x", "--json"), 1, "ServiceError"),
    (("status", "job_x", "--json"), 1, "ServiceError"),
    (("report", "job_x", "--json"), 1, "ServiceError"),
    (("cancel", "job_x", "--json"), 1, "ServiceError"),
    (("validate", "nowhere.jsonl", "--json"), 2, "ConfigurationError"),
    (("run", "nowhere.yaml", "--json"), 2, "ConfigurationError"),
    (("run", "--json", "--max-tokens", "none"), 2, "BadParameter"),
    (("results", "--json"), 2, "MissingParameter"),
    (("run", "--json", "--fly"), 2, "NoSuchOption"),
])  # fmt: skip
def test_with_json_a_failure_is_one_object(
    blend: Callable[..., Any], command: tuple[str, ...], status: int, type_: str
) -> None:
    ran = blend(*command)
    assert ran.status == status
    error = json.loads(ran.stdout)["error"]
    assert error["type"] == type_
    assert error["message"] in ran.stderr
    assert error["retryable"] is False


def test_with_json_a_failed_run_names_its_job(
    blend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLEND_DATABASE__URL", "postgresql://127.0.0.1:9/none")
    monkeypatch.setenv("BLEND_OBJECT_STORE__ENDPOINT_URL", "http://127.0.0.1:9")
    ran = blend("run", "--job-id", "job_x", "--json")
    assert ran.status == 1
    error = json.loads(ran.stdout)["error"]
    assert (error["type"], error["job_id"]) == ("StorageUnavailableError", "job_x")
    assert error["retryable"] is True


def test_with_json_an_interrupt_is_one_object(
    blend: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(settings: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("flows.cli.services.local_stack", interrupted)
    ran = blend("status", "--json")
    assert ran.status == 130
    assert json.loads(ran.stdout)["error"]["type"] == "KeyboardInterrupt"


def test_help_is_no_failure(blend: Callable[..., Any]) -> None:
    assert '"error"' not in blend("run", "--json", "--help").stdout


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("JOB", "nope.yaml", "nope.yaml"),
        ("CRON", "*/5 * * * *", "fires more than once a day"),
        ("TIMEZONE", "Europe/Nowhere", "Europe/Nowhere"),
    ],
)
def test_a_wrong_nightly_setting_is_refused_before_anything_is_stopped_or_started(
    blend: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    value: str,
    sentence: str,
) -> None:
    monkeypatch.setenv(f"BLEND_NIGHTLY__{name}", value)
    ran = blend("up")
    assert ran.status == 2
    assert sentence in ran.stderr
    assert ran.stderr.count("\n") == 1
    assert not (tmp_path / "home").exists()
