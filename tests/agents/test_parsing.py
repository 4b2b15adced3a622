"""What a harness reads of an answer."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.agents.parsing import FORMATS, AnswerParser
from tests.agents.families import FAMILIES, tokenizer_of
from tests.agents.test_rendering import TOOLS


def parser_of(name: str) -> AnswerParser:
    return AnswerParser(str(tokenizer_of(name).chat_template))


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_a_call(name: str) -> None:
    family = FAMILIES[name]
    parsed = parser_of(name).parse(family.call.format(text="a b"), TOOLS)
    assert parsed.content == ""
    assert [(n, json.loads(a)) for n, a in parsed.calls] == [("search", {"text": "a b"})]
    if name != "gpt_oss":  # a call is a message of its own there, whatever was offered
        assert parser_of(name).parse(family.call.format(text="a b")).calls == ()


@pytest.mark.parametrize("name", ["qwen3", "glm4", "deepseek_v3_1"])
def test_several_calls_behind_words(name: str) -> None:
    family = FAMILIES[name]
    text = f"Well.\n{family.call.format(text='a')}\n{family.call.format(text='b')}"
    parsed = parser_of(name).parse(text, TOOLS)
    assert parsed.content == "Well."
    assert [json.loads(a)["text"] for _, a in parsed.calls] == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"text": }}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"text": NaN}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"text": 1e400}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "\\ud800", "arguments": {}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"arguments": {"text": "x"}}\n</tool_call>'),
        ("qwen3", '<tool_call>\n{"name": "search", "arguments": {"text": "x"}}'),
        ("qwen3", "<tool_call>" + "[" * 5000 + "</tool_call>"),
        ("glm4", "<tool_call>search\n<arg_key>text</arg_key>\n<arg_value>x</tool_call>"),
        ("glm4", "<tool_call>\n</tool_call>"),
        ("deepseek_v3_1", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>[1]<｜tool▁call▁end｜>"),
        ("llama3", '{"name": "search", "parameters": {"text": "x"}} and more'),
    ],
)
def test_what_is_no_call_stays_content(name: str, text: str) -> None:
    parsed = parser_of(name).parse(text, TOOLS)
    assert (parsed.content, parsed.calls) == (text, ())


@pytest.mark.parametrize("name", ["qwen3", "llama3", "glm4", "deepseek_v3_1"])
def test_half_a_character_in_a_call_can_be_sent(name: str) -> None:
    """JSON spells it by an escape; text that went over HTTP cannot hold it."""
    ((called, arguments),) = parser_of(name).parse(FAMILIES[name].call.format(text="\\ud800"), TOOLS).calls
    arguments.encode()
    assert (called, json.loads(arguments)) == ("search", {"text": "\\ud800" if name == "glm4" else "\ud800"})


def test_values_have_the_types_of_the_tool() -> None:
    properties = {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "object"}}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": properties}}}
    ]
    keys = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
        for k, v in [("a", "12"), ("b", "12"), ("c", '{"d": null}')]
    )
    ((_, arguments),) = parser_of("glm4").parse(f"<tool_call>f\n{keys}</tool_call>", tools).calls
    assert json.loads(arguments) == {"a": "12", "b": 12, "c": {"d": None}}
    values = "<parameter=a>\n12\n\n</parameter>\n<parameter=b>\nx\n</parameter>\n"
    xml = f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"
    ((_, arguments),) = AnswerParser("<function=", tool_format="qwen_xml").parse(xml, tools).calls
    assert json.loads(arguments) == {"a": "12\n", "b": "x"}


def test_names_of_calls() -> None:
    """Kimi's template shows them to the model, which knows those of its own form alone."""
    kimi = AnswerParser("<|tool_call_begin|>")
    text = '<|tool_call_begin|>functions.f:7<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
    assert kimi.parse(text, TOOLS).calls == (("f", '{"a": 1}'),)
    assert kimi.call_id("f", 4, 1, 2) == "functions.f:3"
    assert parser_of("qwen3").call_id("f", 4, 1, 2) == "c00004001"


def test_reasoning() -> None:
    parser = parser_of("qwen3")
    assert vars(parser.parse("<think>\nr\n</think>\n\nA")) == {"content": "A", "reasoning": "r", "calls": ()}
    assert vars(parser.parse("r</think>A", thinking=True)) == {"content": "A", "reasoning": "r", "calls": ()}
    assert vars(parser.parse("<think>r")) == {"content": "", "reasoning": "r", "calls": ()}
    assert vars(parser.parse("A <think>r</think>")) == {"content": "A <think>r</think>", "reasoning": "", "calls": ()}
    assert parser_of("llama3").parse("<think>r</think>A").content == "<think>r</think>A"


def test_channels_of_gpt_oss() -> None:
    text = (
        "<|channel|>analysis<|message|>r<|end|><|start|>assistant<|channel|>commentary<|message|>first<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'
    )
    parsed = parser_of("gpt_oss").parse(text)
    assert vars(parsed) == {"content": "first", "reasoning": "r", "calls": (("f", '{"a": 1}'),)}
    assert parser_of("gpt_oss").parse("<|channel|>final<|message|>A").content == "A"
    assert parser_of("gpt_oss").parse("just text").content == "just text"
    assert parser_of("gpt_oss").parse(" to=functions.f<|channel|>commentary<|message|>no").content == "no"


MARKS = sorted(
    {mark for one in FORMATS.values() for mark in one.markers} | {"<think>", "</think>", " to=f", "{", '"name":'}
)


@pytest.mark.parametrize("form", [*FORMATS, "none"])
@given(st.lists(st.sampled_from(MARKS) | st.text(max_size=5), max_size=30).map("".join), st.booleans())
def test_any_text_can_be_read(form: str, text: str, thinking: bool) -> None:
    parsed = AnswerParser("</think>", tool_format=form).parse(text, TOOLS, thinking=thinking)
    for _, arguments in parsed.calls:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", FORMATS)
def test_no_text_takes_long(form: str) -> None:
    """A pattern that tries all ways to read a text would hang on these."""
    parser = AnswerParser("</think>", tool_format=form)
    for mark in MARKS:
        parser.parse(mark * 20_000, TOOLS)
        parser.parse(f"{FORMATS[form].start}f" + mark * 5000 + FORMATS[form].end, TOOLS)
