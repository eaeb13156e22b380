"""Services for tests: real ones, started once per session.

A service that cannot be started skips its tests on a laptop and fails them where CI is set.
"""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import psycopg
import pytest
from psycopg import sql

from blend_core.errors import ServiceError
from infra.folder import StateFolder
from infra.state import ExternalServices, StackState
from infra.supervisor import LocalStack
from storage.database import Database
from storage.object_client import ObjectStoreOptions
from storage.objects import ObjectStore

_ELSEWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="session")
def postgres_server_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A superuser's URL of a throwaway server; BLEND_TEST_POSTGRES_URL names another one."""
    given = os.environ.get("BLEND_TEST_POSTGRES_URL")
    if given is not None:
        yield given
        return
    external = ExternalServices(s3_endpoint_url=_ELSEWHERE, prefect_api_url=f"{_ELSEWHERE}/api")
    home = tmp_path_factory.mktemp("postgres") / "home"
    stack = LocalStack(home, external=external, durable=False)
    try:
        _up(stack)
        config = StateFolder(home).load()
        assert config is not None
        yield config.superuser_database_url
    finally:
        stack.erase(_ignore)


@pytest.fixture(scope="module")
def postgres_url(postgres_server_url: str) -> Iterator[str]:
    """The owner's URL of a fresh, empty database for this module."""
    with _fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture
def empty_database_url(postgres_server_url: str) -> Iterator[str]:
    """The owner's URL of a fresh, empty database for this test."""
    with _fresh_database(postgres_server_url) as url:
        yield url


@pytest.fixture(scope="module")
def db(postgres_url: str) -> Iterator[Database]:
    """A fresh database with the platform's tables."""
    database = Database(postgres_url)
    database.upgrade()
    yield database
    database.dispose()


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A throwaway S3 server (nanio), endpoint and keys in the `s3_` attributes."""
    external = ExternalServices(
        database_url="postgresql://127.0.0.1:9/none", prefect_api_url=f"{_ELSEWHERE}/api"
    )
    stack = LocalStack(tmp_path_factory.mktemp("s3") / "home", external=external)
    try:
        yield _up(stack)
    finally:
        stack.erase(_ignore)


@pytest.fixture(scope="session")
def s3_endpoint(s3_server: StackState) -> str:
    """URL of the S3 server."""
    return s3_server.s3_endpoint_url


@pytest.fixture(scope="session")
def object_store_options(s3_server: StackState) -> ObjectStoreOptions:
    """How to reach the S3 server."""
    return ObjectStoreOptions(
        bucket=s3_server.s3_bucket,
        endpoint_url=s3_server.s3_endpoint_url,
        access_key=s3_server.s3_access_key,
        secret_key=s3_server.s3_secret_key,
        region=s3_server.s3_region,
    )


@pytest.fixture
def objects(object_store_options: ObjectStoreOptions) -> ObjectStore:
    """A fresh bucket."""
    store = ObjectStore(replace(object_store_options, bucket=f"test-{secrets.token_hex(6)}"))
    store.ensure_bucket()
    return store


@pytest.fixture
def closed_port() -> int:
    """A loopback port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def _fresh_database(server_url: str) -> Iterator[str]:
    name = f"test_{secrets.token_hex(6)}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
    yield urlsplit(server_url)._replace(path=f"/{name}").geturl()
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _up(stack: LocalStack) -> StackState:
    try:
        return stack.up(_ignore, serve=False)
    except ServiceError as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(error))


def _ignore(line: str) -> None:
    pass
