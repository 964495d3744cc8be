"""Tool calls: every attempt is answered, none repaired, and what is written is read back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.tool_calls import make_parser
from agentrl.types import ParseError, ToolCall


def tool(name: str, **parameters: str) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {
        "type": "function",
        "function": {"name": name, "description": "北京", "parameters": schema},
    }


TOOLS = [tool("calc", expression="string"), tool("search", query="string", limit="integer")]


def parse(name: str, text: str) -> tuple[str, tuple[ToolCall | ParseError, ...]]:
    return make_parser(name, TOOLS).parse(text)


def only(name: str, text: str) -> ToolCall | ParseError:
    _, attempts = parse(name, text)
    assert len(attempts) == 1
    return attempts[0]


def hermes(body: str) -> ToolCall | ParseError:
    return only("hermes", f"<tool_call>{body}</tool_call>")


def test_a_tag_is_a_call_of_the_tool_it_names() -> None:
    content, attempts = parse("tag", "So: <calc>23*47</calc>\nthen <calc>1+1</calc> ok")
    assert content == "So: then  ok"
    assert attempts == (
        ToolCall(id="call_0", name="calc", arguments={"expression": "23*47"}),
        ToolCall(id="call_1", name="calc", arguments={"expression": "1+1"}),
    )


def test_a_tag_that_names_no_tool_is_plain_text() -> None:
    assert parse("tag", "<b>bold</b> </calc> <calculator>1</calculator>")[1] == ()


def test_an_unclosed_tag_and_a_tool_of_two_parameters_are_answered_with_errors() -> None:
    content, attempts = parse("tag", "a <calc>1+2 <calc>3</calc> <search>x</search>")
    assert [type(attempt) for attempt in attempts] == [ParseError, ToolCall, ParseError]
    assert [attempt.id for attempt in attempts] == ["call_0", "call_1", "call_2"]
    assert "</calc>" in attempts[0].error  # type: ignore[union-attr]
    assert "search" in attempts[2].error  # type: ignore[union-attr]
    assert content == "a  "


def test_the_json_decoder_decides_where_a_call_ends() -> None:
    """F038."""
    call = hermes('{"name":"f","arguments":{"a":{"b":{"c":"}{</tool_call>"}}}}')
    assert isinstance(call, ToolCall)
    assert call.arguments["a"]["b"]["c"] == "}{</tool_call>"
    call = hermes('{"name":"now","arguments":{}}')
    assert call == ToolCall(id="call_0", name="now", arguments={})


def test_several_hermes_calls_keep_their_order_and_a_bad_one_its_place() -> None:
    text = (
        'I look.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n{bad}\n'
    )
    text += '</tool_call>\n<tool_call>\n{"name": "b", "arguments": {}}\n</tool_call>'
    content, attempts = parse("hermes", text)
    assert content == "I look."
    assert [getattr(attempt, "name", "error") for attempt in attempts] == ["a", "error", "b"]
    assert [attempt.id for attempt in attempts] == ["call_0", "call_1", "call_2"]


@pytest.mark.parametrize(
    "body",
    [
        r'{"name":"f","arguments":{"code":"print(\'\d\')"}}',
        '{"name":"f","arguments":{"a": [1, 2',
        '{"name":"f","arguments":{"content": "hello } world',
        '{"name":"f"}',
        '{"arguments":{}}',
        '{"name":3,"arguments":{}}',
        '{"name":"f","arguments":[1]}',
        '{"name":"f","arguments":null}',
        '{"name":"f","arguments":"[1]"}',
        '{"name":"f","arguments":"{} {}"}',
        '{"name":"f","arguments":"\\"{}\\""}',
        '{"name":"f","arguments":{"n": NaN}}',
        '{"name":"f","arguments":{"n": -Infinity}}',
        '{"name":"f","arguments":{"n": 1e999}}',
        '{"name":"f","arguments":{"n":1,"n":2}}',
        '{"name":"f","arguments":{"s":"\\ud800"}}',
        '{"name":"f","arguments":"{\\"s\\":\\"\\\\ud800\\"}"}',
        '{"name":"f","arguments":{"s":"a\nb"}}',
        '{"name":"f","arguments":{}} {"name":"g","arguments":{}}',
        '{"name":"f","arguments":{},"argument":{}}',
        '{"name":"f","arguments":' + "[" * 100_000,
        '{"name":"f","arguments":{"n":' + "9" * 5_000 + "}}",
        "",
        "calc(1)",
    ],
)
def test_a_malformed_call_is_one_error_and_never_repaired(body: str) -> None:
    """F040, F041, F043."""
    attempt = hermes(body)
    assert isinstance(attempt, ParseError)
    assert attempt.text == f"<tool_call>{body}</tool_call>"
    assert attempt.error


def test_a_call_without_its_close_is_an_error() -> None:
    """F041."""
    attempt = only("hermes", 'x <tool_call>{"name":"f","arguments":{}}')
    assert isinstance(attempt, ParseError) and "</tool_call>" in attempt.error


def test_a_call_quoted_in_a_broken_one_is_not_executed() -> None:
    """F041."""
    inner = '<tool_call>{"name":"rm","arguments":{}}</tool_call>'
    attempts = parse("hermes", f'<tool_call>{{"name":"f","arguments":{{"t":"{inner}"}}}}')[1]
    assert all(isinstance(attempt, ParseError) for attempt in attempts)


def test_arguments_given_as_a_json_string_are_decoded_once() -> None:
    """F043."""
    call = hermes(r'{"name":"f","arguments":"{\"n\":5}"}')
    assert call == ToolCall(id="call_0", name="f", arguments={"n": 5})
    call = hermes(r'{"name":"f","arguments":{"n":"{\"n\":5}"}}')
    assert isinstance(call, ToolCall) and call.arguments == {"n": '{"n":5}'}


def test_a_surrogate_pair_is_one_character() -> None:
    call = hermes(r'{"name":"f","arguments":{"s":"\ud83d\ude00"}}')
    assert isinstance(call, ToolCall) and call.arguments == {"s": "😀"}


def test_llama_calls_are_bare_json_separated_by_semicolons() -> None:
    two = '{"name": "a", "parameters": {"x": ";}"}}; {"name": "b", "parameters": {}}'
    for text in (two, "<|python_tag|>" + two, "\n" + two):
        content, attempts = parse("llama3", text)
        assert content.strip() == ""
        assert [attempt.name for attempt in attempts] == ["a", "b"]  # type: ignore[union-attr]


def test_llama_text_and_json_answers_are_no_calls() -> None:
    for text in ("1081", '{"answer": 5}', 'see {"name": "a", "parameters": {}}', "{"):
        assert parse("llama3", text) == (text, ())


def test_llama_attempts_that_cannot_be_read_are_errors() -> None:
    for text in (
        '{"name": "a", "parameters": {',
        '{"name": "a", "parameters": [1]}',
        "<|python_tag|>print(1)",
        "<|python_tag|>",
    ):
        assert isinstance(only("llama3", text), ParseError)
    first, second = parse("llama3", '{"name": "a", "parameters": {}}; {"name": "b", oops')[1]
    assert isinstance(first, ToolCall) and isinstance(second, ParseError)


def test_the_format_none_reads_no_calls() -> None:
    text = '<calc>1</calc> <tool_call>{"name":"f","arguments":{}}</tool_call>'
    assert parse("none", text) == (text, ())
    with pytest.raises(ValueError, match="none"):
        make_parser("none", []).format(ToolCall(id="call_0", name="f", arguments={}))


def test_an_unknown_format_is_refused_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="Did you mean 'hermes'"):
        make_parser("hermis", [])


def test_a_tag_cannot_write_what_it_could_not_read_back() -> None:
    parser = make_parser("tag", TOOLS)
    for arguments in (
        {"expression": "</calc>"},
        {"expression": "<calc>"},
        {"expression": 5},
        {"x": "1"},
        {},
    ):
        with pytest.raises(ValueError, match="calc"):
            parser.format(ToolCall(id="call_0", name="calc", arguments=arguments))


def test_descriptions_name_the_tools_unescaped() -> None:
    """F016."""
    for name in ("hermes", "llama3"):
        text = make_parser(name, TOOLS).describe(TOOLS)
        assert "calc" in text and "search" in text and "北京" in text and "\\u" not in text
    text = make_parser("tag", TOOLS).describe(TOOLS)
    assert "<calc>expression</calc> 北京" in text and "search" not in text


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    ["</tool_call>", "<tool_call>", "<|python_tag|>", "}; {", "</think>", '"', "\\", "<calc>"]
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | texts
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
arguments = st.dictionaries(texts, values, max_size=3)


@settings(max_examples=100, deadline=None)
@given(st.lists(arguments, min_size=1, max_size=3), st.sampled_from(["hermes", "llama3"]))
def test_json_formats_read_back_the_calls_they_write(
    given: list[dict[str, Any]], name: str
) -> None:
    parser = make_parser(name, TOOLS)
    calls = [
        ToolCall(id=f"call_{index}", name="search", arguments=arguments)
        for index, arguments in enumerate(given)
    ]
    content, attempts = parser.parse(parser.separator.join(parser.format(call) for call in calls))
    assert content == "" and list(attempts) == calls


@settings(max_examples=50, deadline=None)
@given(texts.filter(lambda text: "<calc>" not in text))
def test_the_tag_format_reads_back_the_calls_it_writes(expression: str) -> None:
    parser = make_parser("tag", TOOLS)
    call = ToolCall(id="call_0", name="calc", arguments={"expression": expression})
    assert parser.parse(parser.format(call)) == ("", (call,))


PIECES = ["<tool_call>", "</tool_call>", "<calc>", "</calc>", "<|python_tag|>", "{", "}", ";", "x"]
PIECES += ['{"name":"f",', '"arguments":{', '{"name":"f","arguments":{}}', '"', "\\", "\n"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.sampled_from(PIECES),
        max_size=12,
    ),
    st.sampled_from(["tag", "hermes", "llama3"]),
)
def test_any_text_gives_ordered_attempts_that_do_not_overlap(pieces: list[str], name: str) -> None:
    """F040."""
    text = "".join(pieces)
    attempts = make_parser(name, TOOLS).scan(text)
    bounds = [bound for attempt in attempts for bound in (attempt.start, attempt.end)]
    assert bounds == sorted(bounds) and all(0 <= bound <= len(text) for bound in bounds)
    assert [attempt.call.id for attempt in attempts] == [f"call_{i}" for i in range(len(attempts))]
