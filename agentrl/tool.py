"""Tools: a typed function with a docstring becomes what a model can call."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from itertools import islice
from typing import Annotated, Any, NotRequired, Self, get_type_hints, overload

import pydantic
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import to_jsonable_python
from typing_extensions import TypedDict

from agentrl.threads import FOREIGN_ERRORS, DeadlineExceeded, call


class Unavailable(RuntimeError):
    """What a tool or an env needs is out of order, through no fault of the policy.

    It is the one error of a tool that is no answer to the model: it makes the episode a fault.
    """


class ToolOutcome(StrEnum):
    """How one call of a tool went."""

    OK = "ok"
    ERROR = "error"  # the tool raised
    BAD_ARGUMENTS = "bad_arguments"  # the tool was not run
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolResult:
    """What the model reads. A tool may return one itself, to fail without raising."""

    content: str
    outcome: ToolOutcome = ToolOutcome.OK


class Tool:
    """A function that a model can call by name, with arguments checked against its signature.

    Arguments are validated by pydantic in its lax mode ("5" passes for an int), without NaN and
    infinities. A coroutine function runs on the event loop, a plain one in a thread of its own,
    and an `inline` one, which must be bounded to microseconds, on the event loop. The calls of a
    turn to tools that are `serial` run one after another, in the order written: they share a state.

    Raises:
        TypeError: the function lacks a docstring or a type, or takes arguments that have no name.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        timeout_s: float = 30.0,
        inline: bool = False,
        serial: bool = False,
    ) -> None:
        doc = inspect.getdoc(function)
        if not doc:
            raise TypeError(
                f"tool {function.__name__} needs a docstring: it is what the model reads about it"
            )
        if inline and inspect.iscoroutinefunction(function):
            raise TypeError(f"tool {function.__name__} is async, and so cannot be inline")
        self.function = function
        self.timeout_s = timeout_s
        self.inline = inline
        self.serial = serial
        description, documented = _read_docstring(doc)
        arguments = _arguments_type(function, documented)
        self._read = partial(_read_by_type, arguments)
        parameters = arguments.json_schema(schema_generator=_Untitled)
        for noise in ("title", "additionalProperties", "description"):
            parameters.pop(noise, None)
        self._describe(function.__name__, description, parameters)

    @classmethod
    def from_schema(
        cls,
        function: Callable[..., Any],
        *,
        name: str,
        description: str,
        parameters: dict[str, Any],
        timeout_s: float = 30.0,
    ) -> Self:
        """A tool that another library describes: `parameters` is the JSON schema of its arguments.

        They are checked strictly ("5" is no integer) and given to `function` by name.

        Raises:
            ValueError: `parameters` is no JSON schema.
        """
        made = cls.__new__(cls)
        made.function = function
        made.timeout_s, made.inline, made.serial = timeout_s, False, False
        made._read = partial(_read_by_schema, _validator(name, json.dumps(parameters)))
        made._describe(name, description, parameters)
        return made

    def _describe(self, name: str, description: str, parameters: dict[str, Any]) -> None:
        self.name = name
        self.description = description
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": {}, **parameters},
            },
        }

    def __repr__(self) -> str:
        return f"Tool({self.name})"

    async def __call__(self, arguments: dict[str, Any]) -> ToolResult:
        """Run the function and say in text what came of it; whatever goes wrong is an outcome.

        Raises:
            Unavailable: as the function did.
        """
        try:
            checked = self._read(arguments)
        except _BadArguments as error:
            return ToolResult(
                content=to_text(self._complaint(error)), outcome=ToolOutcome.BAD_ARGUMENTS
            )
        try:
            if self.inline:
                result = self.function(**checked)
            else:
                work = partial(self.function, **checked)
                result = await call(work, timeout_s=self.timeout_s)
            return result if isinstance(result, ToolResult) else ToolResult(content=to_text(result))
        except DeadlineExceeded:
            return ToolResult(
                content=f"Error: {self.name} timed out after {self.timeout_s:g} s",
                outcome=ToolOutcome.TIMEOUT,
            )
        except Unavailable:
            raise
        except FOREIGN_ERRORS as error:
            return ToolResult(
                content=to_text(f"Error: {type(error).__name__}: {error}"),
                outcome=ToolOutcome.ERROR,
            )

    def _complaint(self, error: _BadArguments) -> str:
        properties = self.schema["function"]["parameters"]["properties"]
        takes = ", ".join(
            f"{name} ({schema['type']})" if "type" in schema else name
            for name, schema in properties.items()
        )
        return f"Error: bad arguments: {error}. {self.name} takes: {takes or 'nothing'}"


@overload
def tool(function: Callable[..., Any]) -> Tool: ...
@overload
def tool(
    *, timeout_s: float = 30.0, inline: bool = False, serial: bool = False
) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make a typed function with a docstring a `Tool`; "Args:" in it describes the arguments.

    Example:
        @tool(timeout_s=5)
        def weather(city: str, days: int = 1) -> str:
            "The weather of the next days."

    A method is made a tool once it is bound: `tool(self.search)`.
    """
    return Tool(function, **options) if function is not None else partial(Tool, **options)


def to_text(result: Any) -> str:
    """A tool's result as the model reads it: text as it is, nothing as "", all else as JSON."""
    if isinstance(result, str):
        return result.encode(errors="replace").decode()  # no tokenizer takes a lone surrogate
    if result is None:
        return ""
    if isinstance(result, bytes | bytearray):
        return result.decode(errors="replace")
    return json.dumps(to_jsonable_python(result, fallback=str), ensure_ascii=False)


class _BadArguments(ValueError):
    """Says in words for the model what is wrong with the arguments of a call."""


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _arguments_type(
    function: Callable[..., Any], documented: dict[str, str]
) -> pydantic.TypeAdapter[Any]:
    hints = get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool {function.__name__}: {parameter} cannot be given by name")
        if name not in hints:
            raise TypeError(
                f"tool {function.__name__}: parameter {name!r} needs a type"
                + ("; make a tool of a bound method: tool(self.method)" if name == "self" else "")
            )
        described = hints[name]
        if name in documented:
            described = Annotated[described, pydantic.Field(description=documented[name])]
        fields[name] = described if parameter.default is parameter.empty else NotRequired[described]
    arguments = TypedDict(function.__name__, fields)  # type: ignore[operator]
    config = pydantic.ConfigDict(extra="forbid", allow_inf_nan=False)
    arguments.__pydantic_config__ = config  # pyright: ignore[reportAttributeAccessIssue]
    return pydantic.TypeAdapter(arguments)


def _read_by_type(arguments: pydantic.TypeAdapter[Any], given: Any) -> dict[str, Any]:
    try:
        return arguments.validate_python(given)
    except pydantic.ValidationError as error:
        details = error.errors(include_url=False, include_input=False, include_context=False)
    wrong = []
    for detail in details[:3]:
        where = ".".join(map(str, detail["loc"]))
        match detail["type"]:
            case "missing":
                wrong.append(f"{where} is missing")
            case "extra_forbidden":
                wrong.append(f"{where} is no argument")
            case _:
                wrong.append(f"{where or 'arguments'}: {detail['msg']}")
    raise _BadArguments("; ".join(wrong))


@cache  # a schema takes milliseconds to check, and each episode makes its tools
def _validator(name: str, schema: str) -> Any:
    import referencing
    from jsonschema import Draft202012Validator, SchemaError
    from jsonschema.validators import validator_for

    parameters = json.loads(schema)
    kind = validator_for(parameters, Draft202012Validator)
    try:
        kind.check_schema(parameters)
    except SchemaError as error:
        raise ValueError(
            f"tool {name}: its parameters are no JSON schema: {error.message}"
        ) from error
    return kind(parameters, registry=referencing.Registry())  # without one it would go online


def _read_by_schema(validator: Any, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise _BadArguments("arguments: they must be an object")
    try:
        json.dumps(given, allow_nan=False)
    except ValueError:
        raise _BadArguments("arguments: NaN and infinities are no numbers") from None
    wrong = []
    for error in islice(validator.iter_errors(given), 3):
        where = ".".join(map(str, error.absolute_path)) or "arguments"
        wrong.append(f"{where}: {error.message:.200}")
    if wrong:
        raise _BadArguments("; ".join(wrong))
    return given


def _read_docstring(doc: str) -> tuple[str, dict[str, str]]:
    """The text before the first section, and what "Args:" says of each parameter."""
    description, *sections = re.split(
        r"^(Args|Returns|Raises|Example|Examples|Yields):\s*$", doc, flags=re.M
    )
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title == "Args":
            lines = inspect.cleandoc(body)
            for entry in re.split(r"^(?=\S)", lines, flags=re.M):
                name, _, text = entry.partition(":")
                arguments[name.split("(")[0].strip()] = " ".join(text.split())
    return " ".join(description.split()), arguments
