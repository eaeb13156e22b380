"""The errors of the platform: one tree, one clear sentence each.

    BlendError
    ├── ConfigurationError      an option, a name or a file of the user's is wrong (exit status 2)
    ├── RequestError            one request is at fault: it becomes an error row, the job goes on
    ├── SourceError             a source cannot be read as given
    │   └── SourceUnavailableError      (retryable) it did not answer, or broke off
    ├── PlanError               a plan cannot be built or read
    ├── EngineError             the engine refused or failed
    │   ├── EngineStartError            it did not come up
    │   └── EngineDiedError             (retryable) its process ended in mid-run
    ├── StorageError            the database or the object store refused
    │   ├── StorageUnavailableError     (retryable) it did not answer
    │   ├── ObjectGoneError             an object of the platform's own is not there any more
    │   └── StaleRunError               the run no longer owns its job
    ├── RunInterruptedError     (retryable) the process was told to end in mid-run; the job can be continued
    └── ServiceError            an embedded service cannot be started, found or stopped

Messages say what to do next, carry ids and never payloads: no prompt, no secret. Every error survives
pickling, so that it can cross from an engine process to its parent.
"""

from enum import StrEnum
from typing import Any, ClassVar


class BlendError(Exception):
    """Base of every error that the platform raises on purpose.

    Attributes:
        message: one sentence that says what is wrong and what to do.
        ids: what the error is about (`job_id`, `seq`, `uri`, …), by name.
        retryable: whether the same call may succeed later without a change by the user.
    """

    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **ids: str | int) -> None:
        super().__init__(message)
        self.message = message
        self.ids = ids

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.ids)


def _rebuild(cls: type[BlendError], message: str, ids: dict[str, str | int]) -> BlendError:
    return cls(message, **ids)


class ConfigurationError(BlendError):
    """An option, a name or a file given by the user is wrong."""


class RequestErrorCode(StrEnum):
    """Why a request has no answer: the closed set of `result.error_code`."""

    INVALID_ENCODING = "invalid_encoding"
    INVALID_JSON = "invalid_json"
    NOT_AN_OBJECT = "not_an_object"
    LINE_TOO_LONG = "line_too_long"
    INVALID_CUSTOM_ID = "invalid_custom_id"
    DUPLICATE_CUSTOM_ID = "duplicate_custom_id"
    INVALID_METHOD = "invalid_method"
    UNSUPPORTED_ENDPOINT = "unsupported_endpoint"
    EMBEDDINGS_NOT_SUPPORTED = "embeddings_not_supported"
    INVALID_BODY = "invalid_body"
    UNSUPPORTED_FIELD = "unsupported_field"
    UNSUPPORTED_VALUE = "unsupported_value"
    INVALID_VALUE = "invalid_value"
    INVALID_MAX_TOKENS = "invalid_max_tokens"
    MODEL_MISMATCH = "model_mismatch"
    NO_PROMPT = "no_prompt"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    TOKEN_OUT_OF_VOCABULARY = "token_out_of_vocabulary"  # noqa: S105 - a code, not a password
    CHAT_TEMPLATE_FAILED = "chat_template_failed"
    TOKENIZER_FAILED = "tokenizer_failed"
    TEMPLATE_FAILED = "template_failed"
    INVALID_SCHEMA = "invalid_schema"
    UNKNOWN_LORA_ADAPTER = "unknown_lora_adapter"
    REQUEST_TOO_LARGE = "request_too_large"
    ENGINE_FAILED = "engine_failed"
    ENGINE_DIED = "engine_died"
    TIMED_OUT = "timed_out"


class RequestError(BlendError):
    """One request is at fault. Its row gets `code` and the message; every other request goes on.

    Attributes:
        code: the row's `error_code`.
    """

    def __init__(self, message: str, code: RequestErrorCode, **ids: str | int) -> None:
        super().__init__(message, **ids)
        self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild_request_error, (type(self), self.message, self.code, self.ids)


def _rebuild_request_error(
    cls: type[RequestError], message: str, code: RequestErrorCode, ids: dict[str, str | int]
) -> RequestError:
    return cls(message, code, **ids)


class SourceError(BlendError):
    """A source cannot be read as it was given."""


class SourceUnavailableError(SourceError):
    """A source did not answer or broke off."""

    retryable = True


class PlanError(BlendError):
    """A plan cannot be built or read."""


class EngineError(BlendError):
    """The engine refused or failed."""


class EngineStartError(EngineError):
    """The engine did not come up."""


class EngineDiedError(EngineError):
    """The engine's process ended in mid-run, hung, ran out of memory or failed in a way that nobody foresaw.

    Its requests in flight have no result and run again.
    """

    retryable = True


class StorageError(BlendError):
    """The database or the object store refused."""


class StorageUnavailableError(StorageError):
    """The database or the object store did not answer."""

    retryable = True


class ObjectGoneError(StorageError):
    """An object of the platform's own is not there any more."""


class StaleRunError(StorageError):
    """The run no longer owns its job; its writes are refused."""


class RunInterruptedError(BlendError):
    """The process was told to end in mid-run; the next run continues the job."""

    retryable = True


class ServiceError(BlendError):
    """An embedded service cannot be started, found or stopped."""
