"""What an error of the S3 client means, in the platform's own errors."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)
from urllib3.exceptions import HTTPError

from blend_core.errors import (
    ObjectGoneError,
    SourceError,
    SourceUnavailableError,
    StorageError,
    StorageUnavailableError,
)

_CREDENTIALS = "BLEND_OBJECT_STORE__ACCESS_KEY and BLEND_OBJECT_STORE__SECRET_KEY"

# The embedded server decodes a path that is decoded already before it checks the signature. A HEAD has no
# body, and tells the status alone.
_DECODED_TWICE = re.compile("%[0-9A-Fa-f]{2}")
_REFUSED_SIGNATURE = ("SignatureDoesNotMatch", "403", "400")

_NO_SUCH_KEY = ("404", "NoSuchKey", "NotFound")

# Everything that the client raises: its own errors, and urllib3's while a body is being read.
CLIENT_ERRORS = (ClientError, BotoCoreError, HTTPError)


def error_code(error: Exception) -> str:
    """S3's own code (`NoSuchKey`, `404`, …), or the name of the client's error."""
    if isinstance(error, ClientError):
        return str(error.response.get("Error", {}).get("Code", "unknown"))
    return type(error).__name__


def is_missing(error: Exception) -> bool:
    """Whether the error says that there is no such object or bucket."""
    return error_code(error) in (*_NO_SUCH_KEY, "NoSuchBucket")


def is_transient(error: Exception) -> bool:
    """Whether the same call may succeed later."""
    if isinstance(error, ClientError):
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        return status >= 500 or error_code(error) in ("SlowDown", "RequestTimeout", "RequestTimeTooSkewed")
    if isinstance(error, NoCredentialsError | PartialCredentialsError | ParamValidationError):
        return False
    broken_off = HTTPClientError | HTTPError | IncompleteReadError
    return isinstance(error, broken_off) or "Connection" in type(error).__name__


def source_error(error: Exception, uri: str) -> SourceError:
    """The error for an object that a user named as a source."""
    kind = SourceUnavailableError if is_transient(error) else SourceError
    return kind(_sentence(error, uri), uri=uri)


def storage_error(error: Exception, uri: str) -> StorageError:
    """The error for an object of our own."""
    if error_code(error) in _NO_SUCH_KEY:
        return ObjectGoneError(f"{uri} is gone; put it back and do this again.", uri=uri)
    kind = StorageUnavailableError if is_transient(error) else StorageError
    return kind(_sentence(error, uri), uri=uri)


@contextmanager
def needed_to_go_on() -> Iterator[None]:
    """An object that is gone in the block is told as one without which its job has no more answers.

    Raises:
        ObjectGoneError: says how to end the job.
    """
    try:
        yield
    except ObjectGoneError as error:
        uri = error.ids["uri"]
        raise ObjectGoneError(
            f"{uri} is gone, and its job cannot go on without it: `blend cancel` ends the job and keeps its "
            "answers; submit the rest as a new one.",
            uri=uri,
        ) from error


def gone_error(uri: str) -> SourceError:
    """The error for an object that was listed, and is not there when it is to be read."""
    return SourceError(
        f"{uri} was deleted after it was listed; put it back and submit the job again.", uri=uri
    )


def changed_error(uri: str) -> SourceError:
    """The error for an object that became another one while it was read."""
    return SourceError(f"{uri} changed while it was read; submit the job again when it is complete.", uri=uri)


def _sentence(error: Exception, uri: str) -> str:
    code = error_code(error)
    if code == "NoSuchBucket":
        return f"The bucket of {uri} does not exist; create it or correct the URI."
    if code == "InvalidBucketName" or (
        isinstance(error, ParamValidationError) and "bucket name" in str(error)
    ):
        return (
            f"The bucket of {uri} has a name that S3 does not allow (3 to 63 lower-case letters, digits, "
            "dots and hyphens); correct the URI, or BLEND_OBJECT_STORE__BUCKET."
        )
    if is_missing(error):
        return f"There is no object {uri}; correct the URI."
    decoded = _DECODED_TWICE.search(uri)
    if decoded is not None and code in _REFUSED_SIGNATURE:
        return (
            f"The object store refused {uri} ({code}): the S3 server of `blend up` takes no {decoded[0]} in "
            f"a name, so rename it; with any other server, correct {_CREDENTIALS}."
        )
    if code in ("AccessDenied", "403", "Forbidden", "AllAccessDisabled"):
        return (
            f"Access to {uri} is denied; let these credentials read and list it, or correct {_CREDENTIALS}."
        )
    if code in ("InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"):
        return f"The object store refused the credentials for {uri} ({code}); correct {_CREDENTIALS}."
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return f"There are no credentials for {uri}; set {_CREDENTIALS}."
    if is_transient(error):
        return (
            f"The object store did not answer for {uri} ({code}); check that it runs, and "
            "BLEND_OBJECT_STORE__ENDPOINT_URL."
        )
    return f"The object store refused {uri} ({code}); check the URI and the credentials."
