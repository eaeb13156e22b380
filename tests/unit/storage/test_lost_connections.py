"""What a client says of a connection that broke off is told apart from a refusal: the work is done again."""

import psycopg
import pytest
from botocore.exceptions import ConnectionClosedError, EndpointConnectionError, IncompleteReadError
from urllib3.exceptions import ProtocolError

from blend_core.errors import StorageError, StorageUnavailableError
from storage import object_errors
from storage.database import storage_error


@pytest.mark.parametrize(
    "error",
    [
        psycopg.OperationalError("server closed the connection unexpectedly"),
        psycopg.errors.AdminShutdown("terminating connection due to administrator command"),
        psycopg.errors.CannotConnectNow("the database system is starting up"),
        psycopg.InterfaceError("the connection is lost"),
    ],
)
def test_a_database_that_broke_off_is_unavailable(error: psycopg.Error) -> None:
    assert isinstance(storage_error(error, "postgresql://host/blend"), StorageUnavailableError)


def test_a_statement_that_was_refused_is_not_tried_again() -> None:
    refused = storage_error(psycopg.errors.CheckViolation("refused"), "postgresql://host/blend")

    assert isinstance(refused, StorageError)
    assert not refused.retryable


@pytest.mark.parametrize(
    "error",
    [
        EndpointConnectionError(endpoint_url="http://127.0.0.1:9"),
        ConnectionClosedError(endpoint_url="http://127.0.0.1:9"),
        IncompleteReadError(actual_bytes=3, expected_bytes=10),
        ProtocolError("broken"),
    ],
)
def test_an_object_store_that_broke_off_is_unavailable(error: Exception) -> None:
    assert isinstance(object_errors.storage_error(error, "s3://b/k"), StorageUnavailableError)
