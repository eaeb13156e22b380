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


def test_the_file_cannot_say_where_it_lies_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BLEND_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".blend").mkdir()
    (tmp_path / ".blend" / "blend.env").write_text("BLEND_HOME=/elsewhere\n")

    with pytest.raises(ConfigurationError, match=r"blend\.env sets BLEND_HOME"):
        load_settings()


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
