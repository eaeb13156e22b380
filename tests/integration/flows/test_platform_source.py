"""A user's query on the platform's own database reads, and cannot touch the platform's sessions."""

from pathlib import Path

import psycopg
import pytest

from blend_core.errors import SourceError
from flows.demo import DemoSize, prepare_demo
from flows.settings import Settings
from flows.wiring import Endpoints, Wiring
from storage.database import Database, ensure_read_only_login
from storage.objects import ObjectStore
from storage.sql_source import stream_rows

pytestmark = [pytest.mark.postgres, pytest.mark.s3]


@pytest.fixture
def wiring(db: Database, tmp_path: Path) -> Wiring:
    reader = ensure_read_only_login(db, "a-password")
    return Wiring.from_settings(Settings(home=tmp_path), Endpoints(db.url, reader))


def test_a_query_cannot_end_a_session_of_the_platform(db: Database, wiring: Wiring) -> None:
    with psycopg.connect(db.url) as session:
        query = f"SELECT pg_terminate_backend({session.info.backend_pid}) AS ended"
        with pytest.raises(SourceError, match="permission denied"):
            list(stream_rows(wiring.source_urls()["platform"], query))
        assert session.execute("SELECT 1").fetchone() == (1,)


def test_the_demos_tickets_can_be_read(db: Database, wiring: Wiring, objects: ObjectStore) -> None:
    job = prepare_demo(db, objects, DemoSize())
    for source in job.sql:
        assert next(stream_rows(wiring.source_urls()[source.connection], source.query))
