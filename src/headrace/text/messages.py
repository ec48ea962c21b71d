"""Chat messages as clients send them, made uniform before a template reads them.

Owes: checked copies in which contents are strings and tool arguments are objects. Source: the OpenAI chat completions
reference.
Does not know: templates, tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.base.errors import RequestError

_PART_TEXT = {"text": "text", "refusal": "refusal"}  # part type -> the field that holds its text


def normalise_messages(messages: Any) -> list[dict[str, Any]]:
    """Checked copies of chat messages.

    Text parts are joined by newlines; null content reads as ""; empty `tool_calls` are left out; `arguments` in JSON
    become objects; `reasoning` is also given as `reasoning_content`. Other fields stay as they are.
    Raises RequestError that names the path (``messages[2].content[0].type``).
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str | bytes):
        raise _wrong("messages", "a list of messages", messages)
    if not messages:
        raise RequestError("messages is empty; send at least one message.", param="messages")
    return [_message(message, f"messages[{n}]") for n, message in enumerate(messages)]


def _message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise _wrong(path, "an object", message)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise _wrong(f"{path}.role", "a string such as 'user'", role)
    out = {**message}
    if "content" not in message and role != "assistant":
        raise RequestError(f"{path}.content is missing.", param=f"{path}.content")
    out["content"] = _content(message.get("content"), f"{path}.content")
    for name, read in _OPTIONAL.items():
        if name in out:
            value = out.pop(name)
            if value is not None and (value := read(value, f"{path}.{name}")):
                out[name] = value
    if "reasoning" in out:
        out.setdefault("reasoning_content", out["reasoning"])
    return out


def _content(content: Any, path: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise _wrong(path, "a string or a list of parts", content)
    return "\n".join(_part(part, f"{path}[{n}]") for n, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, Mapping):
        raise _wrong(path, "an object with a type", part)
    kind = part.get("type")
    field = _PART_TEXT.get(kind) if isinstance(kind, str) else None
    if field is None:
        told = "missing" if kind is None else ascii(kind)[:60]
        raise RequestError(f"{path}.type is {told}; this model reads text parts only.", param=f"{path}.type")
    return _string(part.get(field), f"{path}.{field}")


def _string(value: Any, path: str) -> str:
    if not isinstance(value, str):
        raise _wrong(path, "a string", value)
    return value


def _calls(calls: Any, path: str) -> list[dict[str, Any]]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise _wrong(path, "a list of tool calls", calls)
    return [_call(call, f"{path}[{n}]") for n, call in enumerate(calls)]


def _call(call: Any, path: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise _wrong(path, "an object", call)
    return {**call, "function": _function(call.get("function"), f"{path}.function")}


def _function(function: Any, path: str) -> dict[str, Any]:
    if not isinstance(function, Mapping):
        raise _wrong(path, "an object with name and arguments", function)
    _string(function.get("name"), f"{path}.name")
    return {**function, "arguments": call_arguments(function.get("arguments"), f"{path}.arguments")}


def call_arguments(arguments: Any, path: str) -> dict[str, Any]:
    """The arguments of a call: an object, or JSON text of one; "" and null read as {}. RequestError names `path`."""
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:  # a plain ValueError is about a number of thousands of digits
            known = isinstance(error, json.JSONDecodeError)
            reason = str(error) if known else "it has a number too long, or is nested too deep"
            raise RequestError(f"{path} is not JSON that can be read: {reason}.", param=path) from None
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    if not isinstance(arguments, Mapping):
        raise _wrong(path, "a JSON object", arguments)
    return dict(arguments)


_OPTIONAL: Mapping[str, Callable[[Any, str], Any]] = {
    "tool_calls": _calls,
    "reasoning": _string,
    "reasoning_content": _string,
    "name": _string,
    "tool_call_id": _string,
}


def _wrong(path: str, wanted: str, value: Any) -> RequestError:
    got = "null" if value is None else type(value).__name__
    return RequestError(f"{path} must be {wanted}, not {got}.", param=path)
