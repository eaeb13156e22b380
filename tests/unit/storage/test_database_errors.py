import psycopg
import pytest

from blend_core.errors import StorageUnavailableError
from storage.database import storage_error


def test_a_full_disk_is_waited_for_and_not_called_a_server_that_is_away() -> None:
    error = storage_error(psycopg.errors.DiskFull("no space"), "postgresql://me@host/name")

    assert isinstance(error, StorageUnavailableError)
    assert "has run out of something" in str(error)
    assert "did not answer" not in str(error)


@pytest.mark.parametrize(
    "told",
    [
        "sorry, too many clients already",
        'too many connections for database "blend"',
        "remaining connection slots are reserved for roles with the SUPERUSER attribute",
    ],
)
def test_a_server_without_a_free_connection_is_not_called_away(told: str) -> None:
    refused = psycopg.OperationalError(
        f'connection failed: connection to server at "10.0.0.1", port 5432 failed: FATAL:  {told}\nand more'
    )

    error = storage_error(refused, "postgresql://me@host/name")

    assert isinstance(error, StorageUnavailableError)
    assert f"has run out of something ({told});" in str(error)
