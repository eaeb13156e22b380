"""One row of a query or table to a `Draft`, through the job's sandboxed Jinja templates."""

import datetime
import decimal
import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jinja2
import jinja2.meta
import jinja2.sandbox
import msgspec
from jinja2.exceptions import SecurityError

from blend_core.errors import ConfigurationError, RequestError, RequestErrorCode, SourceError
from blend_core.request import SamplingParams
from flows.ingest.draft import Draft, Endpoint
from flows.ingest.parse import check_custom_id
from flows.ingest.prompt_template import row_template_key
from flows.ingest.prompts import quoted
from flows.ingest.values import read_response_format

MAX_RENDERED_CHARS = 8 << 20
"""Longest text that a template may make of one row."""

_MAX_POWER = 1_000
_FOREIGN_NODES = (jinja2.nodes.Include, jinja2.nodes.Import, jinja2.nodes.FromImport, jinja2.nodes.Extends)
_WIDE_FORMAT = re.compile(r"%[^a-zA-Z]*\d{5}")


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """What a SQL or Parquet source says about its rows.

    Attributes:
        prompt: Jinja template of the user's message.
        system: Jinja template of the system message, or None.
        id_column: column that becomes `custom_id`, or None.
        max_tokens: longest answer.
        temperature: 0 is greedy.
        chat_template_kwargs: variables of the model's chat template.
        response_format: as in a request; None for text.
        lora_adapter: name of the LoRA adapter that is to answer.
    """

    prompt: str
    system: str | None
    id_column: str | None
    max_tokens: int
    temperature: float
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    response_format: dict[str, Any] | None = None
    lora_adapter: str | None = None


class _Missing(jinja2.StrictUndefined):
    """A name that the row has no value for; using it fails with the column's name."""

    def __init__(
        self,
        hint: str | None = None,
        obj: Any = jinja2.utils.missing,
        name: str | None = None,
        exc: Any = None,
    ):
        if hint is None and obj is jinja2.utils.missing and name is not None:
            hint = f"the row has no column {quoted(name)}"
        super().__init__(hint, obj, name, exc or jinja2.UndefinedError)


class _Null(_Missing):
    """A column that is NULL: as a missing one, but it may be asked about (`{% if column %}`)."""

    # The base says that it never returns.
    def __bool__(self) -> bool:  # type: ignore[override]
        return False


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "%"})

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuses products that would fill the memory before the text is measured."""
        if operator == "**" and (abs(left) > _MAX_POWER or abs(right) > _MAX_POWER):
            raise SecurityError(f"a power of more than {_MAX_POWER}")
        if operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise SecurityError("a format wider than 9999 characters")
        for sized, factor in ((left, right), (right, left)):
            if (
                hasattr(sized, "__len__")
                and isinstance(factor, int)
                and len(sized) * factor > MAX_RENDERED_CHARS
            ):
                raise SecurityError(f"a repetition of more than {MAX_RENDERED_CHARS} elements")
        return super().call_binop(context, operator, left, right)


class RowTemplate:
    """Makes a chat request out of a row.

    A NULL counts as undefined and false: writing it fails, `{{ column | default('none') }}` and
    `{% if column %}` deal with it. Decimals keep their digits, dates and times are written as ISO 8601, truth
    values as `true` and `false`, JSON columns as JSON, bytes as text if they are UTF-8.
    """

    __slots__ = ("_fields", "_key", "_names", "_options", "_prompt", "_sampling", "_system")

    def __init__(self, options: TemplateOptions) -> None:
        """Compile the templates.

        Raises:
            ConfigurationError: a template has a fault of syntax.
            RequestError: `response_format` is no valid response format.
        """
        environment = _Environment(undefined=_Missing, finalize=_finalize, autoescape=False)
        environment.tests["none"] = lambda value: value is None or isinstance(value, _Null)
        self._options = options
        form = options.response_format
        json_schema = None if form is None else read_response_format("response_format", form)
        self._sampling = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, json_schema=json_schema
        )
        fields: dict[str, Any] = {
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "response_format": options.response_format,
            "lora_adapter": options.lora_adapter,
        }
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._key = row_template_key(options.system, options.prompt, self._sampling)
        self._names = {*environment.globals, options.id_column}
        for text in filter(None, (options.prompt, options.system)):
            # A fault of syntax is told below, with the name of its part.
            with suppress(jinja2.TemplateSyntaxError, RecursionError):
                self._names |= jinja2.meta.find_undeclared_variables(environment.parse(text))
        self._prompt = _compile(environment, "prompt", options.prompt)
        self._system = None if options.system is None else _compile(environment, "system", options.system)

    @property
    def json_schema(self) -> str | None:
        """The JSON schema that answers are to keep to, as JSON."""
        return self._sampling.json_schema

    def columns_read(self, columns: Iterable[str]) -> list[str]:
        """Those of a table's columns that the templates may ask for, and the id column."""
        return [column for column in columns if column in self._names]

    def check_columns(self, columns: Collection[str]) -> None:
        """Check that the source's columns hold the id column.

        Raises:
            SourceError: they do not.
        """
        id_column = self._options.id_column
        if id_column is not None and id_column not in columns:
            raise SourceError(
                f"The source has no column {quoted(id_column)} for `custom_id`; select one of that name, "
                "or name another as `id_column` (empty for none)."
            )

    def fill(self, row: Mapping[str, Any]) -> Draft:
        """The request of one row.

        Raises:
            RequestError: TEMPLATE_FAILED, EMPTY_PROMPT or INVALID_CUSTOM_ID; `ids` hold a valid `custom_id`.
        """
        custom_id = self._custom_id(row)
        try:
            values = {name: _as_variable(name, value) for name, value in row.items()}
            messages = []
            if self._system is not None:
                messages.append({"role": "system", "content": _render(self._system, "system", values)})
            messages.append({"role": "user", "content": _render(self._prompt, "prompt", values)})
            if not any(message["content"].strip() for message in messages):
                raise RequestError("The template renders to nothing.", RequestErrorCode.EMPTY_PROMPT)
        except RequestError as error:
            error.ids["endpoint"] = Endpoint.CHAT_COMPLETIONS.value
            if custom_id is not None:
                error.ids["custom_id"] = custom_id
            raise
        return self._draft(custom_id, messages)

    def _draft(self, custom_id: str | None, messages: list[dict[str, Any]]) -> Draft:
        options = self._options
        line = {
            "custom_id": custom_id,
            "method": "POST",
            "url": Endpoint.CHAT_COMPLETIONS.value,
            "body": {"messages": messages, **self._fields},
        }
        return Draft(
            custom_id=custom_id,
            endpoint=Endpoint.CHAT_COMPLETIONS,
            model=None,
            messages=messages,
            template_kwargs=dict(options.chat_template_kwargs),
            prompt=None,
            prompt_token_ids=None,
            sampling=self._sampling,
            body=msgspec.json.encode(line),
            prompt_template=self._key,
            lora_adapter=options.lora_adapter,
        )

    def _custom_id(self, row: Mapping[str, Any]) -> str | None:
        column = self._options.id_column
        if column is None:
            return None
        value = row.get(column)
        if value is None:
            raise RequestError(f"The id column {quoted(column)} is NULL.", RequestErrorCode.INVALID_CUSTOM_ID)
        return check_custom_id(id_text(value))


def id_text(value: object) -> str:
    """A column's value as `custom_id`: numbers, times and the like as a template writes them.

    Raises:
        RequestError: it is bytes that are no UTF-8 text.
    """
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise RequestError("`custom_id` is no UTF-8 text.", RequestErrorCode.INVALID_CUSTOM_ID) from None
    return str(_finalize(value))


def _compile(environment: jinja2.Environment, part: str, source: str) -> jinja2.Template:
    try:
        tree = environment.parse(source)
        foreign = [node for kind in _FOREIGN_NODES for node in tree.find_all(kind)]
        if foreign:
            raise jinja2.TemplateSyntaxError(
                "there are no other templates to include, import or extend; write their text here",
                min(node.lineno for node in foreign),
            )
        return environment.from_string(tree)
    except (jinja2.TemplateError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        place = f" (line {line})" if line else ""
        reason = str(getattr(error, "message", error)).rstrip(".")
        raise ConfigurationError(f"The `{part}` template is not valid{place}: {reason}.") from None


def _render(template: jinja2.Template, part: str, values: dict[str, Any]) -> str:
    pieces: list[str] = []
    num_chars = 0
    try:
        for piece in template.generate(values):
            num_chars += len(piece)
            if num_chars > MAX_RENDERED_CHARS:
                raise _failed(part, f"its text is longer than {MAX_RENDERED_CHARS} characters")
            pieces.append(piece)
        text = "".join(pieces)
        text.encode()
    except RequestError:
        raise
    except (jinja2.UndefinedError, SecurityError) as error:
        # These messages name columns and operations; those of other errors may quote the row's text.
        raise _failed(part, str(error)[:200].rstrip(".")) from None
    except UnicodeEncodeError:
        raise _failed(part, "its text is no valid Unicode") from None
    except Exception as error:
        raise _failed(part, f"{type(error).__name__} in the template") from None
    return text


def _failed(part: str, reason: str) -> RequestError:
    return RequestError(
        f"The `{part}` template cannot be filled: {reason}.", RequestErrorCode.TEMPLATE_FAILED
    )


def _as_variable(name: str, value: object) -> object:
    if value is None:
        return _Null(hint=f"the column {quoted(name)} is NULL", name=name)
    if isinstance(value, (bytes, bytearray, memoryview)):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return _Missing(hint=f"the column {quoted(name)} holds bytes that are no UTF-8 text", name=name)
    return value


def _finalize(value: Any) -> Any:
    """How a value of Postgres or Parquet is written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return f"{value:f}"
    if isinstance(value, (dict, list)):
        return msgspec.json.encode(value).decode()
    return value
