from pathlib import Path
from typing import Any

import pytest

from blend_core.errors import ConfigurationError
from blend_core.specs import ModelSpec
from flows.job_spec import BatchJobSpec
from flows.settings import EngineSettings, Settings
from flows.wiring import Endpoints, Wiring

JOB = BatchJobSpec(s3=["s3://bucket/in.jsonl"])
URL = "postgresql://blend:secret@127.0.0.1:9/blend"


def make_settings(tmp_path: Path, **values: Any) -> Settings:
    return Settings(home=tmp_path, **values)


def test_without_a_database_the_user_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="blend up"):
        Endpoints.from_settings(make_settings(tmp_path))


def test_endpoints_come_from_the_settings_and_show_no_secret(tmp_path: Path) -> None:
    settings = make_settings(
        tmp_path,
        database={"url": URL},
        object_store={"endpoint_url": "http://127.0.0.1:9", "access_key": "AK", "secret_key": "hidden"},
    )

    endpoints = Endpoints.from_settings(settings)

    assert endpoints.database_url == URL
    assert endpoints.s3_secret_key == "hidden"
    assert "secret@" not in repr(endpoints)
    assert "hidden" not in repr(endpoints)


def test_sql_sources_are_named_in_any_case(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, sources={"crm": "postgresql://127.0.0.1:9/crm"})

    urls = Wiring.from_settings(settings, Endpoints(database_url=URL)).source_urls()

    assert urls["CRM"] == urls["crm"] == "postgresql://127.0.0.1:9/crm"
    assert urls["platform"] == URL


def test_sql_sources_read_the_platform_by_its_reader(tmp_path: Path) -> None:
    reader = "postgresql://blend_reader:secret@127.0.0.1:9/blend"

    urls = Wiring.from_settings(make_settings(tmp_path), Endpoints(URL, reader)).source_urls()

    assert urls["platform"] == reader


def test_limits_of_the_engine_follow_its_memory(tmp_path: Path) -> None:
    settings = make_settings(tmp_path, engine=EngineSettings(kv_gib=1.0, block_size=16, max_num_seqs=8))
    spec = ModelSpec("tiny", 1, 2, 64, 4, 2, 32, 4, 4096, 1024)

    limits = Wiring.from_settings(settings, Endpoints(database_url=URL)).engine_limits(JOB, spec)

    assert limits.num_blocks == (1 << 30) // (16 * spec.kv_bytes_per_token)
    assert (limits.block_size, limits.max_num_seqs) == (16, 8)


def test_an_unknown_model_is_named_with_the_way_to_add_it(tmp_path: Path) -> None:
    wiring = Wiring.from_settings(make_settings(tmp_path), Endpoints(database_url=URL))

    with pytest.raises(ConfigurationError, match="blend model add no-such-model"):
        wiring.engine(BatchJobSpec(model="no-such-model", s3=["s3://bucket/in.jsonl"]), 0, ["cpu"])
