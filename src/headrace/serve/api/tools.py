"""Tools of a request: what it declares and demands, checked; and what the template, the sampler and the readers need.

Owes: one `ToolUse` for every API that takes tools, each in the shapes of chat completions.
Does not know: HTTP, the shapes of answers. Source: OpenAI's reference of chat completions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from headrace.base.errors import RequestError
from headrace.base.rules import Rule, either, flag, list_of, matching, one_of, open_object, record, refuse, tagged, text
from headrace.core.sampling import SamplingParams
from headrace.core.structured import FIELD, StructuredOutputs
from headrace.text.demands import Demand
from headrace.text.dialect import Dialect
from headrace.text.grammar import embedded

MAX_TOOLS = 128
MAX_SCHEMA_VALUES = 16_384  # JSON values in the parameters of all tools
MAX_SCHEMA_DEPTH = 64

_NAME = matching("[a-zA-Z0-9_-]{1,64}", "a name of 1 to 64 of the characters a-z A-Z 0-9 _ -")
_FUNCTION = {
    "name": _NAME,
    "description": text(),
    "parameters": open_object("a JSON schema, an object"),
    "strict": flag,
}


def _function(members: Mapping[str, Rule]) -> Rule:
    """An object with a function; the only type there is."""
    function = record({"type": one_of("function"), "function": record(members, ("name",))}, ("type", "function"))
    return tagged("type", {"function": function})


TOOLS: Final = list_of(_function(_FUNCTION), MAX_TOOLS, of="tools")
TOOL_CHOICE: Final = either(
    one_of("none", "auto", "required"),
    _function({"name": _NAME}),
    says="'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}",
)


@dataclass(frozen=True, slots=True)
class Tool:
    """One function. shown: as the template shows it. place: where the request declares it (``tools[0].function``).

    parameters: JSON schema of its arguments. strict: calls must follow the schema, also where none is demanded.
    """

    name: str
    shown: Mapping[str, Any]
    place: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """Of its arguments: no parameters, no arguments."""
        if not self.parameters:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {"type": "object", **self.parameters}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What tools a request declares, and which may or must be called.

    choice: none, auto, required, or named (then `named` is the one). parallel: one answer may hold several calls.
    """

    tools: tuple[Tool, ...] = ()
    choice: str = "none"
    named: str = ""
    parallel: bool = True

    @property
    def shown(self) -> list[Mapping[str, Any]]:
        """For the template, also where none may be called: the prompt stays the same, and so do its cached pages."""
        return [tool.shown for tool in self.tools]

    @property
    def callable(self) -> tuple[Tool, ...]:
        """Those that an answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.choice != "named" or tool.name == self.named)

    @property
    def demanded(self) -> bool:
        """Whether the answer must be calls."""
        return self.choice in ("required", "named")

    @property
    def names(self) -> frozenset[str]:
        """Of the callable ones."""
        return frozenset(tool.name for tool in self.callable)


NO_TOOLS: Final = ToolUse()


def tool_use(given: Mapping[str, Any], dialect: Dialect) -> ToolUse:
    """From the fields tools, tool_choice and parallel_tool_calls, which `TOOLS` and `TOOL_CHOICE` have accepted.

    RequestError: names the place of what is wrong, or says that the model's template has no tools.
    """
    tools = _tools(given.get("tools") or ())
    choice, named = _choice(given.get("tool_choice"), tools)
    if tools and dialect.calls is None:
        why = "is not supported by this model: its chat template shows no tools, or in a way that is not known here"
        refuse("tools", why, code="unsupported_parameter")
    return ToolUse(tools, choice, named, given.get("parallel_tool_calls", True))


def prepare(params: SamplingParams, use: ToolUse, dialect: Dialect) -> None:
    """Tell the sampler what an answer with these tools needs."""
    params.shown_token_ids = dialect.shown(calls=bool(use.callable)) or None


def demand(use: ToolUse, thinks: bool, form: StructuredOutputs | None) -> Demand | None:
    """What the sampler must enforce; None if nothing, or if `form` says it all. thinks: the prompt has begun to.

    form: what the client wants of answers that are no calls. RequestError: names the tool whose schema cannot be.
    """
    if use.tools and not use.callable and form is None:
        return Demand(uncalled=True)
    strict = any(tool.strict for tool in use.callable)
    open_ended = form is None or not (use.callable or thinks)
    if open_ended and not (use.demanded or strict or (use.callable and not use.parallel)):
        return None
    return Demand(
        calls=[(tool.name, _arguments(tool, use.demanded or tool.strict)) for tool in use.callable],
        called=use.demanded,
        parallel=use.parallel and use.choice != "named",
        content=None if form is None or use.demanded else _content(form),
        strict=strict,
    )


def _arguments(tool: Tool, enforced: bool) -> str:
    try:
        return embedded(tool.schema if enforced else {"type": "object"}, f"{tool.place}.parameters")
    except RequestError as error:
        raise RequestError(f"The tool {tool.name}: {error}", param=error.param) from None


def _content(form: StructuredOutputs) -> str:
    """The grammar of a form within another."""
    if form.choice is not None:
        return f"({' | '.join(json.dumps(choice, ensure_ascii=False) for choice in form.choice)})"
    if form.json is None and form.json_object is None:
        why = "cannot be combined with tools that may be called, nor with reasoning that the prompt begins"
        refuse(f"{FIELD}.{form.kind}", why, code="unsupported_parameter")
    return embedded({"type": "object"} if form.json is None else form.json, f"{FIELD}.json")


def _tools(given: Sequence[Mapping[str, Any]]) -> tuple[Tool, ...]:
    tools = tuple(_tool(tool["function"], f"tools[{n}].function") for n, tool in enumerate(given))
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            refuse(f"{tool.place}.name", f"must be another than the name of another tool, {tool.name}")
        seen.add(tool.name)
    _check_size([tool.parameters for tool in tools])
    return tools


def _tool(given: Mapping[str, Any], place: str) -> Tool:
    function = {name: value for name, value in given.items() if value is not None}
    parameters = function.get("parameters", {})
    _check_parameters(parameters, f"{place}.parameters")
    strict = function.pop("strict", False)
    return Tool(function["name"], {"type": "function", "function": function}, place, parameters, strict)


def _check_parameters(schema: Mapping[str, Any], place: str) -> None:
    """Arguments are an object: a schema of anything else describes no arguments."""
    if "type" in schema:
        one_of("object").check(f"{place}.type", schema["type"])
    if "properties" in schema:
        open_object().check(f"{place}.properties", schema["properties"])


def _check_size(schemas: Sequence[Any]) -> None:
    """Bounds what templates and grammars must walk through."""
    level, count = list(schemas), 0
    for _ in range(MAX_SCHEMA_DEPTH):
        count += len(level)
        if count > MAX_SCHEMA_VALUES:
            refuse("tools", f"must hold at most {MAX_SCHEMA_VALUES} JSON values in their parameters")
        level = [item for value in level for item in _inside(value)]
        if not level:
            return
    refuse("tools", f"must have parameters nested at most {MAX_SCHEMA_DEPTH} deep")


def _inside(value: Any) -> Sequence[Any]:
    return list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ()


def _choice(given: Any, tools: Sequence[Tool]) -> tuple[str, str]:
    """(choice, the tool's name if one is named)."""
    if isinstance(given, Mapping):
        name = given["function"]["name"]
        if all(tool.name != name for tool in tools):
            refuse("tool_choice.function.name", f"must be the name of one of the tools, got {name}")
        return "named", name
    if given == "required" and not tools:
        raise RequestError("tool_choice: required needs tools.", param="tool_choice")
    return (given or "auto") if tools else "none", ""
