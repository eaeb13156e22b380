"""The whole stack for tests: real Postgres, S3 and Prefect, and a tiny random model."""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from blend_core.errors import ServiceError
from flows.job_spec import BatchJobSpec
from flows.settings import EngineSettings, Settings
from flows.wiring import Endpoints, Wiring
from infra.state import ExternalServices
from infra.supervisor import LocalStack
from storage.object_client import ObjectStoreOptions


@pytest.fixture(scope="session")
def prefect_api_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A throwaway Prefect server."""
    elsewhere = ExternalServices(
        database_url="postgresql://127.0.0.1:9/none", s3_endpoint_url="http://127.0.0.1:9"
    )
    local = LocalStack(tmp_path_factory.mktemp("prefect") / "home", external=elsewhere)
    try:
        yield local.up(lambda line: None, serve=False).prefect_api_url
    except ServiceError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))
    finally:
        local.erase(lambda line: None)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A job's name for a tiny random Llama: its folder."""
    path = Path(__file__).parents[1] / "tiny_llama.py"
    spec = importlib.util.spec_from_file_location("tiny_llama", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return str(module.make_tiny_llama(tmp_path_factory.mktemp("models") / "tiny-llama"))


@pytest.fixture(scope="module")
def endpoints(postgres_url: str, object_store_options: ObjectStoreOptions) -> Endpoints:
    """A fresh database and the S3 server."""
    return Endpoints(
        database_url=postgres_url,
        s3_endpoint_url=object_store_options.endpoint_url,
        s3_bucket=object_store_options.bucket,
        s3_access_key=object_store_options.access_key,
        s3_secret_key=object_store_options.secret_key,
        s3_region=object_store_options.region,
    )


ENGINE = EngineSettings(
    dtype="float32",
    kv_gib=0.02,
    block_size=16,
    max_num_seqs=16,
    max_num_batched_tokens=256,
    num_threads=1,
    restart_delay_s=0.05,
)


@pytest.fixture
def wiring(endpoints: Endpoints, tmp_path: Path) -> Iterator[Wiring]:
    """The parts of a process that runs jobs on the stack."""
    parts = Wiring.from_settings(Settings(home=tmp_path / "home", engine=ENGINE), endpoints)
    parts.database.upgrade()
    parts.objects.ensure_bucket()
    yield parts
    parts.close()


@pytest.fixture(scope="module")
def environment(endpoints: Endpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same parts as variables, for a process that wires itself."""
    engine = {f"BLEND_ENGINE__{name.upper()}": str(value) for name, value in ENGINE.model_dump().items()}
    return {
        "BLEND_HOME": str(tmp_path_factory.mktemp("home")),
        "BLEND_DATABASE__URL": endpoints.database_url,
        "BLEND_OBJECT_STORE__ENDPOINT_URL": str(endpoints.s3_endpoint_url),
        "BLEND_OBJECT_STORE__BUCKET": endpoints.s3_bucket,
        "BLEND_OBJECT_STORE__ACCESS_KEY": str(endpoints.s3_access_key),
        "BLEND_OBJECT_STORE__SECRET_KEY": str(endpoints.s3_secret_key),
        **engine,
    }


@pytest.fixture
def make_job(wiring: Wiring, tiny_model: str, tmp_path: Path) -> "MakeJob":
    """Puts request lines into S3 and rows into a table, and returns the job over both."""
    return MakeJob(wiring, tiny_model, tmp_path.name)


class MakeJob:
    """Jobs over real sources; every test has a folder and a table of its own."""

    def __init__(self, wiring: Wiring, model: str, name: str) -> None:
        self._wiring = wiring
        self._model = model
        self._name = "".join(letter if letter.isalnum() else "_" for letter in name)

    def __call__(
        self,
        *,
        num_chats: int = 0,
        num_rows: int = 0,
        bad_lines: tuple[bytes, ...] = (),
        max_tokens: int = 8,
        **fields: Any,
    ) -> BatchJobSpec:
        """A job with good lines (ids `chat-0`, …), bad ones among them, and rows (ids from 0)."""
        s3, sql = [], []
        if num_chats or bad_lines:
            lines = [_chat_line(number, max_tokens) for number in range(num_chats)]
            for place, line in enumerate(bad_lines):
                lines.insert(2 * place + 1, line)
            entry = self._wiring.objects.put(f"tests/{self._name}/in.jsonl", b"\n".join(lines) + b"\n")
            s3.append(entry.uri)
        if num_rows:
            self._fill_table(num_rows)
            sql.append(
                {
                    "query": f"SELECT id, body FROM ticket_{self._name} ORDER BY id",
                    "prompt": "Summarise: {{ body }}",
                    "max_tokens": max_tokens,
                }
            )
        return BatchJobSpec.model_validate(
            {"name": "test", "model": self._model, "s3": s3, "sql": sql, **fields}
        )

    def _fill_table(self, num_rows: int) -> None:
        with psycopg.connect(self._wiring.endpoints.database_url) as connection:
            connection.execute(f"CREATE TABLE ticket_{self._name} (id int PRIMARY KEY, body text NOT NULL)")
            connection.execute(
                f"INSERT INTO ticket_{self._name} SELECT n, 'ticket ' || n FROM generate_series(0, %s) AS n",
                (num_rows - 1,),
            )


def _chat_line(number: int, max_tokens: int) -> bytes:
    shared = "Please read the report and answer the question. " * 6
    return json.dumps(
        {
            "custom_id": f"chat-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "messages": [{"role": "user", "content": f"{shared}Question {number}."}],
                "max_tokens": max_tokens,
                "temperature": 0,
            },
        }
    ).encode()
