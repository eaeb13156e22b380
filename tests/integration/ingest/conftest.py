from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.state import ExternalServices, StackState
from infra.supervisor import LocalStack
from storage.database import Database
from storage.objects import ObjectStore, ObjectStoreOptions
from tests.tiny_llama import make_tiny_llama


def _ignore(line: str) -> None:
    pass


@pytest.fixture(scope="session")
def ingest_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Embedded Postgres and S3 with the platform's tables and bucket."""
    home = tmp_path_factory.mktemp("ingest") / "home"
    stack = LocalStack(
        home, external=ExternalServices(prefect_api_url="http://127.0.0.1:9/api"), durable=False
    )
    state = stack.up(_ignore, serve=False)
    yield state
    stack.erase(_ignore)


@pytest.fixture(scope="session")
def database(ingest_stack: StackState) -> Iterator[Database]:
    database = Database(ingest_stack.database_url)
    database.upgrade()
    yield database
    database.dispose()


@pytest.fixture(scope="session")
def objects(ingest_stack: StackState) -> ObjectStore:
    return ObjectStore(
        ObjectStoreOptions(
            bucket=ingest_stack.s3_bucket,
            endpoint_url=ingest_stack.s3_endpoint_url,
            access_key=ingest_stack.s3_access_key,
            secret_key=ingest_stack.s3_secret_key,
            region=ingest_stack.s3_region,
        )
    )


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny")
