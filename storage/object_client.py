"""The S3 client: where the object store is, and how long it may take to answer."""

from dataclasses import dataclass, field
from typing import Any

import boto3
from botocore.config import Config

from blend_core.errors import ConfigurationError

_CONNECT_TIMEOUT_S = 10
_READ_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class ObjectStoreOptions:
    """Where objects are.

    Attributes:
        bucket: the bucket for our own objects, created if missing.
        endpoint_url: None for AWS itself.
        access_key: None leaves credentials to boto3's own chain, which refreshes them.
        secret_key: goes with `access_key`.
        region: the bucket's region.
    """

    bucket: str
    endpoint_url: str | None = None
    access_key: str | None = None
    secret_key: str | None = field(default=None, repr=False)
    region: str = "us-east-1"


def object_client(options: ObjectStoreOptions) -> Any:
    """A client of boto3's, which threads may share. Connects to nothing yet.

    Raises:
        ConfigurationError: the endpoint is no URL.
    """
    try:
        return boto3.session.Session().client(
            "s3",
            endpoint_url=options.endpoint_url,
            aws_access_key_id=options.access_key,
            aws_secret_access_key=options.secret_key,
            region_name=options.region,
            config=Config(
                connect_timeout=_CONNECT_TIMEOUT_S,
                read_timeout=_READ_TIMEOUT_S,
                retries={"mode": "standard", "total_max_attempts": 4},
                # A server beside AWS is reached by path and may not know the newer checksums.
                s3={"addressing_style": "path" if options.endpoint_url else "auto"},
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    except ValueError as error:
        raise ConfigurationError(
            "The object store's endpoint is no URL; correct BLEND_OBJECT_STORE__ENDPOINT_URL."
        ) from error
