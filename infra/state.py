"""Where the services of a stack are: what `stack.json` remembers, and what the platform is handed."""

from dataclasses import dataclass, field
from urllib.parse import quote

DATABASE_NAME = "blend"
OWNER_ROLE = "blend"
READER_ROLE = "blend_reader"
BUCKET_NAME = "blend"
REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class ExternalServices:
    """What the user runs himself. A service whose URL is given here is not started.

    Attributes:
        database_url: Postgres of the platform's tables.
        read_only_database_url: the same database through its read-only role, if there is one.
        s3_endpoint_url: an S3 endpoint; the other `s3_` values count only together with it.
        s3_access_key: None leaves credentials to boto3's own chain.
        s3_secret_key: goes with `s3_access_key`.
        s3_bucket: the bucket for shards and outputs.
        s3_region: the endpoint's region.
        prefect_api_url: a Prefect server's API, ending in `/api`.
    """

    database_url: str | None = field(default=None, repr=False)
    read_only_database_url: str | None = field(default=None, repr=False)
    s3_endpoint_url: str | None = None
    s3_access_key: str | None = field(default=None, repr=False)
    s3_secret_key: str | None = field(default=None, repr=False)
    s3_bucket: str = BUCKET_NAME
    s3_region: str = REGION
    prefect_api_url: str | None = None


@dataclass(frozen=True, slots=True)
class StackState:
    """Where the services are, embedded ones and external ones alike. Secrets are left out of its `repr`.

    Attributes:
        database_url: `postgresql://` URL of the owner of the platform's tables.
        read_only_database_url: the same database for the role `blend_reader`; None where an external
            database names none.
        s3_endpoint_url: `http(s)://host:port`.
        s3_access_key: None leaves credentials to boto3's own chain (external endpoints only).
        s3_secret_key: goes with `s3_access_key`.
        s3_bucket: exists once `up` has returned (embedded endpoint).
        s3_region: the endpoint's region.
        prefect_api_url: ends in `/api`.
    """

    database_url: str = field(repr=False)
    read_only_database_url: str | None = field(repr=False)
    s3_endpoint_url: str
    s3_access_key: str | None = field(repr=False)
    s3_secret_key: str | None = field(repr=False)
    s3_bucket: str
    s3_region: str
    prefect_api_url: str

    @property
    def prefect_ui_url(self) -> str:
        """The address of Prefect's pages for a browser."""
        return self.prefect_api_url.removesuffix("/").removesuffix("/api")


@dataclass(frozen=True, slots=True)
class StackConfig:
    """What `stack.json` remembers.

    Made once; a port changes only when a stranger took it while the service was down.

    Attributes:
        postgres_port: loopback port.
        s3_port: loopback port.
        prefect_port: loopback port.
        superuser_password: Postgres role `postgres`.
        owner_password: Postgres role `blend`.
        reader_password: Postgres role `blend_reader`.
        s3_access_key: of the S3 server's one user.
        s3_secret_key: of the S3 server's one user.
        postgres_root: folder of Postgres' data; remembered, so that it is found after the folder moved.
    """

    postgres_port: int
    s3_port: int
    prefect_port: int
    superuser_password: str = field(repr=False)
    owner_password: str = field(repr=False)
    reader_password: str = field(repr=False)
    s3_access_key: str = field(repr=False)
    s3_secret_key: str = field(repr=False)
    postgres_root: str

    @property
    def database_url(self) -> str:
        """The owner's URL."""
        return self._database_url(OWNER_ROLE, self.owner_password, DATABASE_NAME)

    @property
    def read_only_database_url(self) -> str:
        """The reader's URL."""
        return self._database_url(READER_ROLE, self.reader_password, DATABASE_NAME)

    @property
    def superuser_database_url(self) -> str:
        """The superuser's URL of the database `postgres`: for making roles and databases only."""
        return self._database_url("postgres", self.superuser_password, "postgres")

    @property
    def s3_endpoint_url(self) -> str:
        """The S3 server's URL."""
        return f"http://127.0.0.1:{self.s3_port}"

    @property
    def prefect_api_url(self) -> str:
        """The Prefect server's API URL."""
        return f"http://127.0.0.1:{self.prefect_port}/api"

    def _database_url(self, role: str, password: str, database: str) -> str:
        return f"postgresql://{role}:{quote(password, safe='')}@127.0.0.1:{self.postgres_port}/{database}"


def stack_state(config: StackConfig | None, external: ExternalServices) -> StackState | None:
    """Where the services are: the user's own where given, else the embedded; None while one is missing."""
    database_url, read_only_database_url = external.database_url, external.read_only_database_url
    if database_url is None and config is not None:
        database_url, read_only_database_url = config.database_url, config.read_only_database_url
    endpoint_url, bucket, region = external.s3_endpoint_url, external.s3_bucket, external.s3_region
    access_key, secret_key = external.s3_access_key, external.s3_secret_key
    if endpoint_url is None and config is not None:
        endpoint_url, bucket, region = config.s3_endpoint_url, BUCKET_NAME, REGION
        access_key, secret_key = config.s3_access_key, config.s3_secret_key
    prefect_api_url = external.prefect_api_url
    if prefect_api_url is None and config is not None:
        prefect_api_url = config.prefect_api_url
    if database_url is None or endpoint_url is None or prefect_api_url is None:
        return None
    return StackState(
        database_url=database_url,
        read_only_database_url=read_only_database_url,
        s3_endpoint_url=endpoint_url,
        s3_access_key=access_key,
        s3_secret_key=secret_key,
        s3_bucket=bucket,
        s3_region=region,
        prefect_api_url=prefect_api_url,
    )
