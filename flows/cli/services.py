"""From settings to services: the user's own where the environment names them, else the embedded ones."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from blend_core.errors import ServiceError
from flows.cli.output import tell
from flows.settings import Settings, load_settings, settings_file

if TYPE_CHECKING:
    from flows.wiring import Endpoints, Wiring
    from infra.state import ExternalServices, StackState
    from infra.supervisor import LocalStack
    from storage.database import Database


def local_stack(settings: Settings) -> "LocalStack":
    """The embedded services of the state folder; changes nothing."""
    from infra.supervisor import LocalStack

    return LocalStack(settings.home, external=_external(settings), settings_file=settings_file(settings.home))


@contextmanager
def connected(settings: Settings | None = None) -> Iterator["Wiring"]:
    """The parts of a command that reads: nothing is started.

    Raises:
        ServiceError: the embedded services do not run.
    """
    from flows.wiring import Wiring

    settings = settings or load_settings()
    wiring = Wiring.from_settings(settings, _running_endpoints(settings))
    try:
        yield wiring
    finally:
        wiring.close()


@contextmanager
def connected_database() -> Iterator["Database"]:
    """The database alone, for a command that needs nothing else: nothing is started.

    Raises:
        ServiceError: no database is named and the embedded one does not run.
    """
    from storage.database import Database

    settings = load_settings()
    if settings.database.url is not None:
        url = settings.database.url.get_secret_value()
    else:
        url = _running_endpoints(settings).database_url
    database = Database(url)
    try:
        yield database
    finally:
        database.dispose()


@contextmanager
def brought_up(settings: Settings | None = None) -> Iterator["Wiring"]:
    """The parts of a command that works: starts what is missing and brings the tables up to date first.

    A Prefect server that does not come up is told and done without, since our own tables decide about a job.

    Args:
        settings: as read from the environment when None.

    Raises:
        ServiceError: Postgres or the S3 server did not come up.
    """
    from flows.wiring import Wiring

    settings = settings or load_settings()
    wiring = Wiring.from_settings(settings, _started_endpoints(settings))
    try:
        wiring.database.upgrade()
        _ensure_reader(wiring)
        wiring.objects.ensure_bucket()
        # Prefect's own client reads this variable; it must be there before Prefect is imported.
        if wiring.endpoints.prefect_api_url is not None:
            os.environ.setdefault("PREFECT_API_URL", wiring.endpoints.prefect_api_url)
        yield wiring
    finally:
        wiring.close()


def read_only_url(wiring: "Wiring") -> str:
    """URL of the database through its read-only login.

    An external database without `BLEND_DATABASE__READ_ONLY_URL` gets a login with a new password.
    """
    from storage.database import ensure_read_only_login

    known = wiring.endpoints.read_only_database_url
    if known is not None:
        return known
    url = ensure_read_only_login(wiring.database, secrets.token_urlsafe(24))
    tell("A new password was set; keep this URL in BLEND_DATABASE__READ_ONLY_URL.")
    return url


def _ensure_reader(wiring: "Wiring") -> None:
    """Gives the embedded login its rights; a login of the user's own database is the user's affair."""
    from storage.database import ensure_read_only_login

    url = wiring.endpoints.read_only_database_url
    if url is None or wiring.settings.database.url is not None:
        return
    ensure_read_only_login(wiring.database, urlsplit(url).password or "")


def _running_endpoints(settings: Settings) -> "Endpoints":
    from flows.wiring import Endpoints

    if _needs_no_stack(settings):
        return Endpoints.from_settings(settings)
    stack = local_stack(settings)
    state = stack.state()
    missing = _missing_services(stack)
    needed = missing & {"postgres", "s3"}
    if state is None or needed:
        raise ServiceError(
            f"The services of {stack.home} do not run ({', '.join(sorted(needed))}); start them with "
            "`blend up`, or name the state folder of others in BLEND_HOME."
        )
    return _endpoints_of(state, has_prefect="prefect" not in missing)


def _started_endpoints(settings: Settings) -> "Endpoints":
    from flows.wiring import Endpoints

    if _needs_no_stack(settings):
        return Endpoints.from_settings(settings)
    stack = local_stack(settings)
    missing = _missing_services(stack)
    if missing:
        try:
            stack.up(tell, serve=False)
        except ServiceError as error:
            missing = _missing_services(stack)
            if missing != {"prefect"}:
                raise
            tell(f"Going on without Prefect: {error}")
        else:
            missing = set()
    state = stack.state()
    assert state is not None, "a stack that came up knows where it is"
    return _endpoints_of(state, has_prefect="prefect" not in missing)


def _missing_services(stack: "LocalStack") -> set[str]:
    from infra.supervisor import ServiceState

    usable = (ServiceState.RUNNING, ServiceState.EXTERNAL)
    return {entry.name for entry in stack.status() if entry.name != "serve" and entry.state not in usable}


def _needs_no_stack(settings: Settings) -> bool:
    return settings.database.url is not None and settings.object_store.endpoint_url is not None


def _endpoints_of(state: "StackState", *, has_prefect: bool) -> "Endpoints":
    from flows.wiring import Endpoints

    return Endpoints(
        database_url=state.database_url,
        read_only_database_url=state.read_only_database_url,
        s3_endpoint_url=state.s3_endpoint_url,
        s3_bucket=state.s3_bucket,
        s3_access_key=state.s3_access_key,
        s3_secret_key=state.s3_secret_key,
        s3_region=state.s3_region,
        prefect_api_url=state.prefect_api_url if has_prefect else None,
    )


def _external(settings: Settings) -> "ExternalServices":
    from infra.state import ExternalServices

    database, store = settings.database, settings.object_store
    return ExternalServices(
        database_url=None if database.url is None else database.url.get_secret_value(),
        read_only_database_url=(
            None if database.read_only_url is None else database.read_only_url.get_secret_value()
        ),
        s3_endpoint_url=store.endpoint_url,
        s3_access_key=None if store.access_key is None else store.access_key.get_secret_value(),
        s3_secret_key=None if store.secret_key is None else store.secret_key.get_secret_value(),
        s3_bucket=store.bucket,
        s3_region=store.region,
        prefect_api_url=settings.prefect_api_url,
    )
