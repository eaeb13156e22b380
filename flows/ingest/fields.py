"""The documented rule of every field that a request's body may have.

A field is read with effect, accepted where its value asks for what happens anyway, or refused by name.
`null` means absent everywhere. `docs/requests.md` shows this table, and a test holds the two together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from blend_core.errors import RequestError, RequestErrorCode
from flows.ingest.draft import Endpoint
from flows.ingest.prompts import read_messages, read_prompt
from flows.ingest.values import (
    read_bool,
    read_int,
    read_lora_adapter,
    read_max_tokens,
    read_model,
    read_number,
    read_object,
    read_response_format,
    read_stop,
    read_structured_outputs,
    read_top_k,
    read_top_p,
)
from flows.numbers import MAX_TOKENS

Read = Callable[[str, object], object]


class Effect(StrEnum):
    """What a field does."""

    READ = "read"
    IGNORED = "no effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """How one field of a body is treated.

    Attributes:
        name: the field.
        endpoints: where it may stand.
        effect: what it does.
        accepts: the values that pass, in words; of a refused field, why it is refused.
        read: takes name and value, returns the value to use, raises `RequestError` for any other.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    effect: Effect
    accepts: str
    read: Read


_BOTH = (Endpoint.CHAT_COMPLETIONS, Endpoint.COMPLETIONS)
_CHAT = (Endpoint.CHAT_COMPLETIONS,)
_COMPLETIONS = (Endpoint.COMPLETIONS,)


def _accept_anything(name: str, value: object) -> object:
    return value


def _only(*allowed: object) -> Read:
    """Accepts the values that ask for what happens anyway (a bool is not a number here)."""

    def read(name: str, value: object) -> object:
        for one in allowed:
            if value == one and isinstance(value, bool) == isinstance(one, bool):
                return value
        raise RequestError(
            f"`{name}` has a value that is not supported; {_listed(allowed)}.",
            RequestErrorCode.UNSUPPORTED_VALUE,
        )

    return read


def _listed(allowed: tuple[object, ...]) -> str:
    names = [str(one).lower() if isinstance(one, bool) else repr(one) for one in allowed]
    return f"leave it out or give {' or '.join(names)}" if names else "leave it out"


def _refuse(reason: str) -> Read:
    def read(name: str, value: object) -> object:
        raise RequestError(f"`{name}` is not supported: {reason}.", RequestErrorCode.UNSUPPORTED_FIELD)

    return read


def _read(name: str, endpoints: tuple[Endpoint, ...], accepts: str, read: Read) -> FieldRule:
    return FieldRule(name, endpoints, Effect.READ, accepts, read)


def _ignored(name: str, endpoints: tuple[Endpoint, ...], accepts: str, read: Read) -> FieldRule:
    return FieldRule(name, endpoints, Effect.IGNORED, accepts, read)


def _refused(name: str, endpoints: tuple[Endpoint, ...], reason: str) -> FieldRule:
    return FieldRule(name, endpoints, Effect.REFUSED, reason, _refuse(reason))


FIELD_RULES: tuple[FieldRule, ...] = (
    _read(
        "model",
        _BOTH,
        "a string of up to 512 characters; recorded, the job's model runs the request",
        read_model,
    ),
    _read("messages", _CHAT, "a list of messages, see below", read_messages),
    _read("prompt", _COMPLETIONS, "a string, a list of one string, or a list of token ids", read_prompt),
    _read("max_tokens", _BOTH, "an integer from 1; cut to what the context has room for", read_max_tokens),
    _read(
        "max_completion_tokens",
        _CHAT,
        "the same; equal to `max_tokens` where both are given",
        read_max_tokens,
    ),
    _read("min_tokens", _BOTH, "an integer from 0, at most `max_tokens`", read_int(0, MAX_TOKENS)),
    _read("temperature", _BOTH, "a number from 0 to 2; 1 if absent", read_number(0.0, 2.0)),
    _read("top_p", _BOTH, "a number above 0, at most 1", read_top_p),
    _read("top_k", _BOTH, "an integer from 1; 0 or -1 keeps the whole vocabulary", read_top_k),
    _read("seed", _BOTH, "an integer of 64 bits", read_int(-(2**63), 2**63 - 1)),
    _read("stop", _BOTH, "a string or a list of up to 4 strings, none empty", read_stop),
    _read("ignore_eos", _BOTH, "true or false", read_bool),
    _read("chat_template_kwargs", _CHAT, "an object; more variables of the chat template", read_object),
    _read(
        "response_format",
        _BOTH,
        "an object whose `type` is `text`, `json_object` or `json_schema` (with `json_schema.schema`); JSON "
        "needs the engine `vllm`",
        read_response_format,
    ),
    _read(
        "structured_outputs",
        _BOTH,
        'vLLM\'s form of the same, an object {"json": a JSON schema}; needs the engine `vllm`',
        read_structured_outputs,
    ),
    _read(
        "lora_adapter",
        _BOTH,
        "the name of one of the job's LoRA adapters, which `model` may name, too; needs the engine `vllm`",
        read_lora_adapter,
    ),
    _ignored("user", _BOTH, "anything", _accept_anything),
    _ignored("metadata", _BOTH, "anything", _accept_anything),
    _ignored("store", _BOTH, "anything", _accept_anything),
    _ignored("service_tier", _BOTH, "anything", _accept_anything),
    _ignored("safety_identifier", _BOTH, "anything", _accept_anything),
    _ignored("prompt_cache_key", _BOTH, "anything", _accept_anything),
    _ignored("parallel_tool_calls", _CHAT, "true or false", read_bool),
    _ignored("n", _BOTH, "1", _only(1)),
    _ignored("stream", _BOTH, "false", _only(False)),
    _ignored("logprobs", _BOTH, "false or 0", _only(False, 0)),
    _ignored("top_logprobs", _CHAT, "0", _only(0)),
    _ignored("presence_penalty", _BOTH, "0", _only(0)),
    _ignored("frequency_penalty", _BOTH, "0", _only(0)),
    _ignored("repetition_penalty", _BOTH, "1", _only(1)),
    _ignored("min_p", _BOTH, "0", _only(0)),
    _ignored("logit_bias", _BOTH, "an empty object", _only({})),
    _ignored("modalities", _CHAT, 'a list ["text"]', _only(["text"])),
    _ignored("tool_choice", _CHAT, '"none"', _only("none")),
    _ignored("best_of", _COMPLETIONS, "1", _only(1)),
    _ignored("echo", _COMPLETIONS, "false", _only(False)),
    _ignored("suffix", _COMPLETIONS, "an empty string", _only("")),
    _refused("tools", _CHAT, "the model's answer is text, no function is called"),
    _refused("functions", _CHAT, "the model's answer is text, no function is called"),
    _refused("function_call", _CHAT, "the model's answer is text, no function is called"),
    _refused("stream_options", _BOTH, "a batch has no stream"),
    _refused("audio", _CHAT, "only text is generated"),
    _refused("prediction", _CHAT, "predicted outputs are not used"),
    _refused("reasoning_effort", _CHAT, "set the variable of the model's template in `chat_template_kwargs`"),
    _refused("web_search_options", _CHAT, "nothing is searched"),
)
"""Every field that is known by name; any other is refused as unknown."""

RULES_BY_ENDPOINT: dict[Endpoint, dict[str, FieldRule]] = {
    endpoint: {rule.name: rule for rule in FIELD_RULES if endpoint in rule.endpoints} for endpoint in Endpoint
}
"""The rules of one endpoint by field name."""


def rules_table() -> str:
    """The rules as a Markdown table: what `docs/requests.md` shows."""
    lines = ["| field | endpoints | effect | accepted values, or why it is refused |", "|---|---|---|---|"]
    for rule in FIELD_RULES:
        endpoints = (
            "both" if rule.endpoints == _BOTH else "chat" if rule.endpoints == _CHAT else "completions"
        )
        lines.append(f"| `{rule.name}` | {endpoints} | {rule.effect} | {rule.accepts} |")
    return "\n".join(lines)
