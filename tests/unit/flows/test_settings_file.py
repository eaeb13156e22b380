"""Settings that do not depend on the shell: `blend.env` in the state folder, below the environment."""

from pathlib import Path

import pytest

from blend_core.errors import ConfigurationError
from flows.nights import check_nightly
from flows.settings import load_settings


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file may be written."""
    monkeypatch.setenv("BLEND_HOME", str(tmp_path))
    return tmp_path / "blend.env"


def test_the_file_is_read_and_the_environment_wins(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(
        "# the night\nBLEND_NIGHTLY__JOB=/srv/night.yaml\nBLEND_NIGHTLY__CRON='30 2 * * *'\n"
        "BLEND_SOURCES__SHOP=postgresql://me:secret@db/shop\nBLEND_NIGHTLY__TIMEZONE=Europe/Berlin\n"
    )
    monkeypatch.setenv("BLEND_NIGHTLY__TIMEZONE", "Europe/Paris")

    settings = load_settings()

    assert settings.nightly.job == Path("/srv/night.yaml")
    assert (settings.nightly.cron, settings.nightly.timezone) == ("30 2 * * *", "Europe/Paris")
    assert settings.sources["shop"].get_secret_value() == "postgresql://me:secret@db/shop"


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("BLEND_NIGHTLYY__JOB=/a.yaml", "BLEND_NIGHTLYY__JOB"),
        ("BLEND_NIGHTLY__JOBB=/a.yaml", "BLEND_NIGHTLY__JOBB"),
        ("AWS_REGION=eu", "AWS_REGION"),
        ("BLEND_ENGINE__KV_GIB=none", "BLEND_ENGINE__KV_GIB"),
        ("BLEND_NIGHTLY__JOB=night.yaml", "absolute path"),
    ],
)
def test_a_line_that_is_wrong_is_named_with_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str
) -> None:
    file.write_text(f"{line}\n")

    with pytest.raises(ConfigurationError, match=name) as refused:
        load_settings()

    assert str(file) in str(refused.value)


def test_longer_contexts_are_allowed_as_vllm_reads_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for value, is_taken in (("1", True), (" True", True), ("0", False), ("yes", False), ("", False)):
        monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", value)
        assert load_settings().is_any_context_length_taken == is_taken


@pytest.mark.parametrize(
    ("name", "reader"), [("CUDA_VISIBLE_DEVICES", "CUDA"), ("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "vLLM")]
)
def test_what_others_read_in_the_environment_is_set_there(file: Path, name: str, reader: str) -> None:
    file.write_text(f"BLEND_ENGINE__NAME=torch\n{name}=1\n")
    with pytest.raises(ConfigurationError, match=rf"Line 2 of .* sets {name}, which {reader} reads"):
        load_settings()


def test_a_home_folder_is_expanded_like_anywhere_else(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("BLEND_HOME", "~/state")
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "blend.env").write_text("BLEND_NIGHTLY__TIMEZONE=Europe/Berlin\n")
    settings = load_settings()
    assert settings.home == tmp_path / "state"
    assert settings.nightly.timezone == "Europe/Berlin"


@pytest.mark.parametrize("in_environment", [True, False])
def test_the_file_cannot_say_where_it_lies_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_environment: bool
) -> None:
    monkeypatch.delenv("BLEND_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    home = tmp_path / ".blend"
    home.mkdir()
    (home / "blend.env").write_text(f"BLEND_HOME={home}\n")
    if in_environment:
        monkeypatch.setenv("BLEND_HOME", str(home))

    with pytest.raises(ConfigurationError, match=r"Line 1 of .*blend\.env sets BLEND_HOME"):
        load_settings()


@pytest.mark.parametrize(
    "line",
    [
        "BLEND_NIGHTLY__CRON: 0 3 * * *",
        "garbage line",
        "BLEND_NIGHTLY__JOB",
        "BLEND_NIGHTLY__CRON='0 3 * * *",
        "BLEND_NIGHTLY__CRON='0 3 * * *'x",
        "BLEND_SOURCES__A='x\nBLEND_SOURCES__B='",
    ],
)
def test_a_line_that_sets_nothing_is_named_by_its_number(file: Path, line: str) -> None:
    file.write_text(f"# the night\n\n{line}\nBLEND_NIGHTLY__TIMEZONE=UTC\n")

    with pytest.raises(ConfigurationError, match="NAME=value") as refused:
        load_settings()

    assert f"Line 3 of {file}" in str(refused.value)


@pytest.mark.parametrize("line", ["BLEND_NIGHTLYY__JOB=", "home=/elsewhere"])
def test_no_line_is_passed_over_by_its_name(file: Path, line: str) -> None:
    file.write_text(f"{line}\n")

    with pytest.raises(ConfigurationError, match=r"line 1 of .* is no setting"):
        load_settings()


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("pa${HOME}ss$x", "pa${HOME}ss$x"),
        ("pa#ss # a comment", "pa#ss"),
        ("'pa #ss' # a comment", "pa #ss"),
        ("""'it\\'s "so"'""", """it's "so\""""),
        ('"a\\"b"', 'a"b'),
        ("it's", "it's"),
    ],
)
def test_a_value_is_taken_as_it_stands(file: Path, written: str, value: str) -> None:
    file.write_text(f"BLEND_SOURCES__SHOP={written}\n")

    assert load_settings().sources["shop"].get_secret_value() == value


@pytest.mark.parametrize(
    ("name", "value"),
    [("BLEND_DATABASE", "x"), ("BLEND_SOURCES", "{bad"), ("BLEND_ENGINE__VLLM", "x")],
)
def test_a_group_that_is_no_json_is_named_with_its_place(
    file: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    file.write_text(f"{name}={value}\n")
    with pytest.raises(ConfigurationError, match=f"^{name} in line 1 of .*blend.env is no JSON"):
        load_settings()

    monkeypatch.setenv(name, "{}")
    with pytest.raises(ConfigurationError, match=f"^{name} in line 1 of .*blend.env is no JSON"):
        load_settings()

    file.unlink()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match=f"^Environment variable {name} is no JSON"):
        load_settings()


def test_a_part_of_a_group_in_json_is_told_by_the_place_of_the_group(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BLEND_ENGINE", '{"kv_gib": "much"}')

    with pytest.raises(ConfigurationError, match=r"^Environment variable BLEND_ENGINE: "):
        load_settings()


def test_an_empty_value_means_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text("BLEND_NIGHTLY__JOB=\nBLEND_DATABASE__URL=\n")
    settings = load_settings()
    assert (settings.nightly.job, settings.database.url) == (None, None)

    file.write_text("BLEND_NIGHTLY__JOB=/srv/night.yaml\n")
    monkeypatch.setenv("BLEND_NIGHTLY__JOB", "")
    assert load_settings().nightly.job is None


def test_a_folder_in_place_of_the_file_is_refused(file: Path) -> None:
    file.mkdir()

    with pytest.raises(ConfigurationError, match="cannot be read") as refused:
        load_settings()

    assert str(file) in str(refused.value)


def test_a_file_that_is_no_text_is_named(file: Path) -> None:
    file.write_bytes(b"\xff\xfe\x00")

    with pytest.raises(ConfigurationError, match="cannot be read") as refused:
        load_settings()

    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("content", "variable"),
    [
        (
            '"sql": [{"query": "SELECT 1 AS id", "prompt": "{{ id }}", "connection": "shop"}]',
            "BLEND_SOURCES__SHOP",
        ),
        (
            '"s3": ["s3://b/k"], "write_back": {"connection": "shop", "table": "t", "key_column": "id"}',
            "BLEND_TARGETS__SHOP",
        ),
    ],
)
def test_a_nightly_job_whose_connection_has_no_url_is_refused(
    file: Path, content: str, variable: str
) -> None:
    job = file.with_name("night.yaml")
    job.write_text(f'{{"name": "tickets", {content}}}')
    file.write_text(f"BLEND_NIGHTLY__JOB={job}\n")
    with pytest.raises(ConfigurationError, match=f"'shop'.*{variable}"):
        check_nightly(load_settings())

    file.write_text(f"BLEND_NIGHTLY__JOB={job}\n{variable}=postgresql://db/shop\n")
    check_nightly(load_settings())


def test_a_nightly_job_whose_engine_is_not_here_is_told_at_once_as_a_run_tells_it(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flows.serving.installed_vllm", lambda: None)
    job = file.with_name("night.yaml")
    job.write_text("name: night\ns3: ['s3://b/k']\noptions: {engine: vllm}\n")
    file.write_text(f"BLEND_NIGHTLY__JOB={job}\n")
    with pytest.raises(ConfigurationError, match="The engine `vllm` cannot be used: vLLM is not installed"):
        check_nightly(load_settings())
    job.write_text("name: night\ns3: ['s3://b/k']\n")
    check_nightly(load_settings())
