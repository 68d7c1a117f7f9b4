"""Chat templates: messages to the prompt text that a model was tuned on.

Rules: a template comes with the model and is not trusted: it runs in jinja2's immutable sandbox; jinja2 is imported on
first use; messages are checked before the template sees them; what a template itself refuses is an InputError.
The result is text: encode it with add_special_tokens=False, for templates write their own bos token.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bucketgraph.errors import InputError, ModelError

if TYPE_CHECKING:
    from jinja2 import Template

_EXPECTED = 'a list such as [{"role": "user", "content": "Hello"}]'


class _Refused(Exception):
    """Raised by a template through raise_exception(); carries its message out of jinja2."""


def render(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """Render a chat template; `variables` reach it as they are (add_generation_prompt, bos_token, tools, ...).

    Raises InputError for malformed messages or what the template refuses, ModelError for a template that does not
    compile or a missing jinja2.
    """
    check_messages(messages)
    compiled = _compile(template)
    import jinja2

    try:
        return compiled.render(messages=messages, **variables)
    except _Refused as error:
        raise InputError("the chat template refused the messages", given=str(error)) from error
    except jinja2.exceptions.SecurityError as error:
        raise ModelError("the chat template does something that the sandbox forbids", given=str(error)) from error
    # A template fails on unforeseen messages as any Python expression does: text + list, a missing key.
    except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
        what = "the chat template cannot render the messages"
        raise InputError(what, given=f"{type(error).__name__}: {error}", expected=_EXPECTED) from error


def check_messages(messages: object) -> None:
    """Raise InputError unless `messages` is a non-empty list of dicts with a role and content or tool calls."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InputError("messages", given=_short(messages), expected=_EXPECTED)
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InputError(where, given=_short(message), expected="a dict with role and content")
        if not isinstance(message.get("role"), str) or not message["role"]:
            raise InputError(f"{where} role", given=_short(message.get("role")), expected="text such as 'user'")
        content = message.get("content")
        if content is None and message.get("tool_calls"):
            continue
        if not isinstance(content, str | list):
            raise InputError(f"{where} content", given=_short(content), expected="text, or a list of parts")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError as error:
        hint = 'pip install "bucketgraph[llm]"'
        raise ModelError("a chat template needs the jinja2 package", hint=hint) from error

    class GenerationTag(Extension):
        """{% generation %} marks the assistant's part for training; rendering keeps only what is inside."""

        tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        return environment.from_string(template)
    except jinja2.TemplateError as error:
        raise ModelError("the model's chat template does not compile", given=str(error)) from error


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own tojson escapes <, > and & for HTML, which would change the prompt.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise _Refused(message)
