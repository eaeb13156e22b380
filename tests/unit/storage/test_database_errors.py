import psycopg

from blend_core.errors import StorageUnavailableError
from storage.database import storage_error


def test_a_full_disk_is_waited_for_and_not_called_a_server_that_is_away() -> None:
    error = storage_error(psycopg.errors.DiskFull("no space"), "postgresql://me@host/name")

    assert isinstance(error, StorageUnavailableError)
    assert "has run out of something" in str(error)
    assert "did not answer" not in str(error)
