import os
import socket
import sys

import psycopg
import pytest

from storage.database import Database
from storage.postgres_connection import connect_options

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads options of Linux's sockets")


def _seconds_until_given_up(connection: psycopg.Connection) -> tuple[float, float]:
    """When the kernel breaks a connection whose other end is gone: in silence, and while it sends."""
    with socket.socket(fileno=os.dup(connection.fileno())) as probe:
        assert probe.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle_s, interval_s, count = (
            probe.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        sending_ms = probe.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
    return idle_s + interval_s * count, sending_ms / 1_000


@needs_linux
def test_a_server_that_vanishes_without_a_word_is_given_up_within_half_a_minute(db: Database) -> None:
    with db.raw() as connection:
        silent_s, sending_s = _seconds_until_given_up(connection)
    assert 0 < silent_s <= 30
    assert 0 < sending_s <= 30
    with db.connect() as pooled:
        own = pooled.connection.driver_connection
        assert isinstance(own, psycopg.Connection)
        assert _seconds_until_given_up(own) == (silent_s, sending_s)


@needs_linux
def test_what_the_url_says_of_the_connection_is_heeded(postgres_url: str) -> None:
    database = Database(f"{postgres_url}?keepalives_idle=47&application_name=mine")
    try:
        with database.raw() as connection, database.connect() as pooled:
            for each in (connection, pooled.connection.driver_connection):
                assert each is not None
                assert each.info.get_parameters()["application_name"] == "mine"
                assert _seconds_until_given_up(each)[0] == 47 + 5 * 3
    finally:
        database.dispose()


def test_a_url_without_options_gets_all_of_ours() -> None:
    ours = connect_options("postgresql://host/name")
    assert connect_options("postgresql://host/name?connect_timeout=3") == {
        name: value for name, value in ours.items() if name != "connect_timeout"
    }
