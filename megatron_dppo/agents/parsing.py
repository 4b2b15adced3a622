"""What a harness gets to read of an answer: reasoning, content and tool calls. Token ids never come from here.

vLLM's parsers are not to be had without vLLM, and those of transformers need a schema that few tokenizers bring along;
a model's way of writing calls is a pattern, chosen by what its chat template writes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_dppo.agents.messages import strict_json

THINK, END_THINK = "<think>", "</think>"
_HALF = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Parsed:
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    """Name and arguments (text of a JSON object) of each."""


type Types = Mapping[str, Mapping[str, Any]]
"""Of every parameter of every tool."""


@dataclass(frozen=True)
class Format:
    written: str
    """By chat templates of this format, and by no other before it in `FORMATS`."""
    start: str
    end: str
    """Of one call; without them all of the content is one."""
    read: Callable[[str, Types], tuple[str, str] | None]
    """Name and arguments of what stands between, or None where that is no call."""
    markers: tuple[str, ...] = ()
    """Special tokens that the text is to show."""


def _object(text: str) -> Any:
    try:
        return strict_json(text)
    except (ValueError, RecursionError):
        return None


def _text(arguments: dict[str, Any]) -> str:
    """As JSON. Half a character, which a model can write as an escape, stays one: no text can hold it."""
    text = json.dumps(arguments, ensure_ascii=False)
    return json.dumps(arguments) if _HALF.search(text) else text


def _named(text: str, field: str) -> tuple[str, str] | None:
    """Of `{"name": ..., field: {...}}`."""
    value = _object(text)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name or _HALF.search(name):
        return None
    arguments = value.get(field, {})
    return (name, _text(arguments)) if isinstance(arguments, dict) else None


def _pairs(name: str, pairs: Sequence[tuple[str, str]], tools: Types) -> tuple[str, str] | None:
    """Of values that are text, or JSON where the tool's parameter is none."""
    if not name or any(mark in name for mark in "<>\n"):
        return None
    types = tools.get(name, {})
    made = {}
    for key, text in pairs:
        value = None if types.get(key) == "string" else _object(text)
        made[key] = text if value is None and text.strip() != "null" else value
    return name, _text(made)


def _glm(body: str, tools: Types) -> tuple[str, str] | None:
    name, *parts = body.split("<arg_key>")
    pairs = []
    for part in parts:
        key, found, rest = part.partition("</arg_key>")
        value, ended, _ = rest.lstrip().removeprefix("<arg_value>").partition("</arg_value>")
        if not found or not ended:
            return None
        pairs.append((key, value))
    return _pairs(name.strip(), pairs, tools)


def _qwen_xml(body: str, tools: Types) -> tuple[str, str] | None:
    if not body.lstrip().startswith("<function="):
        return None
    name, *parts = body.partition("</function>")[0].split("<parameter=")
    pairs = []
    for part in parts:
        key, _, rest = part.partition(">")
        value = rest.rpartition("</parameter>")[0]
        pairs.append((key, value.removeprefix("\n").removesuffix("\n")))
    return _pairs(name.strip().removeprefix("<function=").removesuffix(">"), pairs, tools)


def _deepseek(body: str, tools: Types) -> tuple[str, str] | None:
    name, _, arguments = body.partition("<｜tool▁sep｜>")
    if name == "function":  # DeepSeek-V3 and R1: the kind first, and the arguments in a block of code
        name, _, arguments = arguments.partition("\n")
        arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return _json_of(name, arguments)


def _kimi(body: str, tools: Types) -> tuple[str, str] | None:
    name, _, arguments = body.partition("<|tool_call_argument_begin|>")
    return _json_of(name.strip().removeprefix("functions.").partition(":")[0], arguments)


def _json_of(name: str, arguments: str) -> tuple[str, str] | None:
    return (name, arguments.strip()) if name and isinstance(_object(arguments), dict) else None


_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
)
_KIMI = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
         "<|tool_call_argument_begin|>", "<|tool_call_end|>")  # fmt: skip
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_CALL = ("<tool_call>", "</tool_call>")
_GLM = (*_CALL, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

FORMATS: dict[str, Format] = {
    "glm": Format("<arg_key>", *_CALL, _glm, _GLM),
    "qwen_xml": Format("<function=", *_CALL, _qwen_xml, _CALL),
    "hermes": Format("<tool_call>", *_CALL, lambda body, tools: _named(body, "arguments"), _CALL),
    "deepseek": Format(_DEEPSEEK[2], *_DEEPSEEK[2:4], _deepseek, _DEEPSEEK),
    "kimi": Format(_KIMI[2], _KIMI[2], _KIMI[4], _kimi, _KIMI),
    "harmony": Format("<|channel|>", "", "", lambda body, tools: None, HARMONY),
    "llama": Format('"parameters": ', "", "", lambda body, tools: _named(body, "parameters"), ("<|python_tag|>",)),
}
"""By name; the first that a template writes is the model's."""

_SECTIONS = (*_DEEPSEEK[:2], *_KIMI[:2])

_ENDS = ("<|end|>", "<|call|>", "<|return|>")


class AnswerParser:
    """Answers of one model."""

    def __init__(self, template: str, *, tool_format: str = "auto") -> None:
        """tool_format  a name of `FORMATS`; "auto" goes by the template; "none" leaves calls in the content"""
        found = next((name for name, one in FORMATS.items() if one.written in template), None)
        name = found if tool_format == "auto" else tool_format
        self._format = None if name in (None, "none") else FORMATS[str(name)]
        self._harmony, self._kimi = name == "harmony", name == "kimi"
        self._thinks = END_THINK in template
        self.markers = frozenset({THINK, END_THINK, *(self._format.markers if self._format else ())})
        """Special tokens that the text to `parse` is to show."""

    def parse(self, text: str, tools: Any = None, *, thinking: bool = False) -> Parsed:
        """
        text      of an answer, without the token that ended it
        tools     that the request named
        thinking  whether it begins inside of reasoning
        """
        if self._harmony:
            return read_channels(text)
        content, reasoning = self._split(text, thinking) if self._thinks else (text, "")
        calls: list[tuple[str, str]] = []
        if self._format is not None and tools:
            calls, rest = _take(self._format, content, _types(tools))
            content = rest if calls else content
        return Parsed(content, reasoning, tuple(calls))

    def call_id(self, name: str, turn: int, place: int, before: int) -> str:
        """Of a turn's call at a place, with so many calls in the conversation before it. Nine letters and digits, as
        Mistral's templates ask; Kimi's write it where the model reads it, and the model knows its own alone."""
        return f"functions.{name}:{before + place}" if self._kimi else f"c{turn:05d}{place:03d}"

    def _split(self, text: str, thinking: bool) -> tuple[str, str]:
        begun = text.lstrip()
        if not thinking and not begun.startswith(THINK):
            return text, ""
        reasoning, end, content = (text if thinking else begun).removeprefix(THINK).partition(END_THINK)
        return content.lstrip("\n") if end else "", reasoning.strip("\n")


def read_channels(text: str) -> Parsed:
    """gpt-oss: a message is a head, <|message|>, a body and an end. On the channel "analysis" it is reasoning, one
    to a function is a call, the others are content, and so is what has no head."""
    said: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, str]] = []
    head, *messages = text.split("<|message|>")
    for message in messages:
        end = min((at for one in _ENDS if (at := message.find(one)) >= 0), default=len(message))
        body, behind = message[:end], message[end:].partition("|>")[2]
        to = _word(head, " to=").removeprefix("functions.")
        call = _json_of(to, body)
        if call:
            calls.append(call)
        else:
            kind = "reasoning" if not to and _word(head, "<|channel|>") == "analysis" else "content"
            said[kind].append(body)
        head = behind
    if head.strip():
        said["content"].append(head)
    return Parsed("\n".join(said["content"]), "\n".join(said["reasoning"]), tuple(calls))


def _word(text: str, behind: str) -> str:
    return text.partition(behind)[2].partition("<")[0].partition(" ")[0].strip()


def _take(form: Format, content: str, tools: Types) -> tuple[list[tuple[str, str]], str]:
    """The calls, and the content without them. What is no whole call stays in it."""
    if not form.start:
        call = form.read(content.strip().removeprefix("<|python_tag|>"), tools)
        return ([call], "") if call else ([], content)
    first, *blocks = content.split(form.start)
    calls, rest = [], [first]
    for block in blocks:
        body, ended, behind = block.partition(form.end)
        call = form.read(body, tools) if ended else None
        if call is None:
            rest.append(form.start + block)
        else:
            calls.append(call)
            rest.append(behind)
    kept = "".join(rest)
    for section in _SECTIONS:
        kept = kept.replace(section, "")
    return calls, kept.strip()


def _types(tools: Any) -> dict[str, dict[str, Any]]:
    """Of every parameter of every tool."""
    made: dict[str, dict[str, Any]] = {}
    for tool in tools if isinstance(tools, list) else ():
        function = tool.get("function") if isinstance(tool, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            known = parameters.get("properties") if isinstance(parameters, dict) else None
            known = known if isinstance(known, dict) else {}
            made[function["name"]] = {k: v.get("type") for k, v in known.items() if isinstance(v, dict)}
    return made
