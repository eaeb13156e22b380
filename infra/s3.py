"""The embedded S3 server: `nanio`, with generated keys and its objects in the state folder."""

import os
import re
import signal
import sys
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.processes import ServiceProcess
from infra.state import BUCKET_NAME, REGION, StackConfig

_UNFINISHED_UPLOAD = re.compile(r"\.tmp\.[0-9a-f]{32}")


class S3Service:
    """The embedded S3 server with the bucket `blend`."""

    __slots__ = ("_config", "_data_folder", "process")

    name = "s3"
    start_timeout_s = 60.0

    def __init__(self, home: Path, config: StackConfig) -> None:
        """Changes nothing.

        Args:
            home: the state folder.
            config: port and keys.
        """
        self._config = config
        self._data_folder = home / "s3"
        self.process = ServiceProcess(self.name, home)

    @property
    def url(self) -> str:
        """The endpoint."""
        return self._config.s3_endpoint_url

    def launch(self) -> None:
        """Start it, without the half objects of uploads that a kill broke off."""
        self.process.end_leftovers()
        for folder, _, names in os.walk(self._data_folder):
            for name in names:
                if _UNFINISHED_UPLOAD.fullmatch(name):
                    (Path(folder) / name).unlink()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("NANIO_")}
        self.process.launch(
            [
                *(sys.executable, "-m", "nanio", "serve"),
                *("--host", "127.0.0.1", "--port", str(self._config.s3_port)),
                *("--data-dir", str(self._data_folder), "--region", REGION),
                *("--log-level", "warning", "--no-access-log"),
            ],
            environment={
                **environment,
                "NANIO_ACCESS_KEY": self._config.s3_access_key,
                "NANIO_SECRET_KEY": self._config.s3_secret_key,
            },
        )

    def is_ready(self) -> bool:
        """Whether it answers; an unsigned request is refused, which is an answer."""
        connection = HTTPConnection("127.0.0.1", self._config.s3_port, timeout=2)
        try:
            connection.request("GET", "/")
            return connection.getresponse().status in {200, 401, 403}
        except (OSError, HTTPException):
            return False
        finally:
            connection.close()

    def prepare(self) -> None:
        """Make the bucket."""
        client = boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name=REGION,
            aws_access_key_id=self._config.s3_access_key,
            aws_secret_access_key=self._config.s3_secret_key,
            config=Config(proxies={}, s3={"addressing_style": "path"}),
        )
        try:
            client.create_bucket(Bucket=BUCKET_NAME)
        except ClientError as error:
            if error.response["Error"]["Code"] not in {"BucketAlreadyOwnedByYou", "BucketAlreadyExists"}:
                raise
        finally:
            client.close()

    def stop(self) -> None:
        """Let answers under way end, then stop."""
        self.process.stop([(signal.SIGTERM, 10.0)])
