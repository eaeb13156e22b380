import pytest

from blend_core.errors import ConfigurationError, StorageUnavailableError
from storage.database import Database


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_every_spelling_of_the_scheme_gives_the_same_url(scheme: str) -> None:
    database = Database(f"{scheme}://me:p%25w%40d@host:5433/name")
    assert database.url == "postgresql://me:p%25w%40d@host:5433/name"
    assert "p%25w" not in database.safe_url


@pytest.mark.parametrize(
    "url", ["mysql://me:secret@host/db", "secret", "postgresql://me:secret@host:port/db"]
)
def test_a_wrong_url_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match="BLEND_DATABASE__URL") as caught:
        Database(url)
    assert "secret" not in str(caught.value)


def test_a_server_that_is_not_there_is_named_without_the_password(closed_port: int) -> None:
    database = Database(f"postgresql://me:secret@127.0.0.1:{closed_port}/name")
    for call in (database.current_revision, database.upgrade, database.open_raw):
        with pytest.raises(StorageUnavailableError, match=f"127.0.0.1:{closed_port}") as caught:
            call()
        assert "secret" not in str(caught.value)
