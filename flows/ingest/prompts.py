"""Readers of what a request asks: chat messages, or the prompt of a completion."""

from typing import Any

from blend_core.errors import RequestError, RequestErrorCode
from flows.ingest.values import invalid_value

# A chat template knows `system`; OpenAI renamed that role to `developer` for newer models.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES_OF_TOOLS = ("tool", "function")
_MAX_TOKEN_ID = 2**31 - 1


def read_messages(name: str, value: object) -> list[dict[str, Any]]:
    """Chat messages as a chat template gets them: `role`, `content` as one text, `name` where given.

    Text parts are joined by line ends. Raises `RequestError` for anything that is not text.
    """
    if not isinstance(value, list):
        raise invalid_value(f"`{name}` must be a list of messages.")
    messages = [_read_message(message, index) for index, message in enumerate(value)]
    for message in messages:
        content = message["content"]
        if content and not content.isspace():
            return messages
    raise RequestError(f"`{name}` has no text.", RequestErrorCode.EMPTY_PROMPT)


def read_prompt(name: str, value: object) -> str | list[int]:
    """The prompt of a completion: text, or token ids that are not negative."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], (str, list)):
        value = value[0]
    if isinstance(value, str):
        if not value:
            raise RequestError(f"`{name}` is empty.", RequestErrorCode.EMPTY_PROMPT)
        return value
    if not isinstance(value, list):
        raise invalid_value(f"`{name}` must be a string or a list of token ids.")
    if not value:
        raise RequestError(f"`{name}` is empty.", RequestErrorCode.EMPTY_PROMPT)
    if isinstance(value[0], (str, list)):
        raise RequestError(
            f"`{name}` holds {len(value)} prompts; give each its own line.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    if not all(type(token) is int and 0 <= token <= _MAX_TOKEN_ID for token in value):
        raise invalid_value(f"`{name}` must be a string or a list of token ids (integers from 0).")
    return value


def _read_message(message: object, index: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid_value(f"`messages[{index}]` must be an object.")
    role = message.get("role")
    known_role = _ROLES.get(role) if isinstance(role, str) else None
    if known_role is None:
        raise _role_error(role, index)
    content = message.get("content")
    if isinstance(content, str) and len(message) == 2 and known_role == role:
        return message
    read: dict[str, Any] = {"role": known_role, "content": None}
    for field, value in message.items():
        if field == "content":
            read["content"] = value if isinstance(value, str) else _read_parts(value, index)
        elif field == "name" and isinstance(value, str):
            read["name"] = value
        elif field != "role" and value is not None:
            raise _message_field_error(field, index)
    if read["content"] is None:
        raise invalid_value(f"`messages[{index}].content` must be a string or a list of text parts.")
    return read


def _role_error(role: object, index: int) -> RequestError:
    if role in _ROLES_OF_TOOLS:
        return RequestError(
            f"`messages[{index}]` is the answer of a tool, which is not supported.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    return invalid_value(f"`messages[{index}].role` must be one of {', '.join(_ROLES)}.")


def _message_field_error(field: str, index: int) -> RequestError:
    if field == "name":
        return invalid_value(f"`messages[{index}].name` must be a string.")
    return RequestError(
        f"`messages[{index}]` has the field {quoted(field)}, which is not supported.",
        RequestErrorCode.UNSUPPORTED_FIELD,
    )


def _read_parts(parts: object, index: int) -> str | None:
    if parts is None:
        return None
    if not isinstance(parts, list):
        raise invalid_value(f"`messages[{index}].content` must be a string or a list of text parts.")
    return "\n".join(_read_part(part, index) for part in parts)


def _read_part(part: object, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise invalid_value(f'`messages[{index}].content` has a part that is no object with a "type".')
    if kind != "text":
        raise RequestError(
            f"`messages[{index}].content` has a part of type {quoted(kind)}; only text is supported.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )
    for field in part:
        if field not in ("type", "text"):
            raise RequestError(
                f"`messages[{index}].content` has a text part with the field {quoted(field)}, "
                "which is not supported.",
                RequestErrorCode.UNSUPPORTED_FIELD,
            )
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid_value(f"`messages[{index}].content` has a text part without a text.")
    return text


def quoted(name: str) -> str:
    """A name from the input as messages show it: short, and without control characters."""
    shown = name if len(name) <= 40 else name[:37] + "..."
    return repr(shown)
