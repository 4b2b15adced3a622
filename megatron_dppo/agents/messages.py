"""Chat messages, and when two of them are the same: a harness sends the whole conversation with every request. And how
a request is refused."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")


class Refused(Exception):
    """A request that gets an HTTP status and one line, in the form of OpenAI's errors."""

    def __init__(self, status: int, message: str, *, code: str = "invalid_request", param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, object]:
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class ToolCall:
    """A call as the harness sees it; `arguments` is the text of a JSON object where the model wrote one."""

    id: str
    name: str
    arguments: str


def call_object(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in the form of OpenAI's messages."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass(frozen=True)
class Message:
    """One message. A field that a client left out, set to null or emptied is the same to it."""

    role: str
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""

    @property
    def key(self) -> str:
        """Equal for messages that are the same: every character counts, but in arguments of calls the JSON value alone.
        Without the reasoning, which clients drop: see `same_reasoning`."""
        calls = [[call.id, call.name, canonical(call.arguments)] for call in self.tool_calls]
        return json.dumps([self.role, self.content, calls, self.tool_call_id, self.name])

    def same_reasoning(self, sent: Message) -> bool:
        """Whether `sent`, which has this message's key, is this one. The official clients know no field for reasoning
        and leave it out; a harness that sends another one has edited it."""
        return sent.reasoning in ("", self.reasoning)


def read_messages(value: Any) -> tuple[Message, ...]:
    """`messages` of a request. Raises `Refused` with the place of what is wrong."""
    if not isinstance(value, list) or not value:
        raise Refused(400, "messages must be a list of at least one message", param="messages")
    return tuple(_message(one, f"messages[{number}]") for number, one in enumerate(value))


def digests(root: Any, messages: Sequence[Message]) -> list[bytes]:
    """Digest of `root` (any JSON) and the first n messages, for n = 0 ... len(messages)."""
    found = [hashlib.blake2b(canonical_value(root).encode("utf-8", "surrogatepass")).digest()]
    for message in messages:
        found.append(hashlib.blake2b(found[-1] + message.key.encode("utf-8", "surrogatepass")).digest())
    return found


def strict_json(text: str | bytes) -> Any:
    """A value of JSON. Raises ValueError for NaN, Infinity and numbers that no float holds, which JSON does not have or
    could not give back, and RecursionError."""

    def finite(number: str) -> float:
        return value if math.isfinite(value := float(number)) else _no(number)

    return json.loads(text, parse_constant=_no, parse_float=finite)


def canonical(text: str) -> str:
    """A spelling that is the same for all JSON texts of one value; text that is no JSON stays what it is. Numbers are
    compared as decimals of any length; an object that names a key twice, NaN and Infinity are no JSON."""
    try:
        value = json.loads(text, parse_int=Decimal, parse_float=Decimal, parse_constant=_no, object_pairs_hook=_once)
        return "json:" + canonical_value(value)
    except (ValueError, RecursionError, InvalidOperation):
        return "text:" + text


def canonical_value(value: Any) -> str:
    """The same of a value that was read."""
    if isinstance(value, dict):
        inside = ",".join(f"{json.dumps(key)}:{canonical_value(value[key])}" for key in sorted(value))
        return f"{{{inside}}}"
    if isinstance(value, list):
        return f"[{','.join(canonical_value(one) for one in value)}]"
    if isinstance(value, Decimal | int | float) and not isinstance(value, bool):
        return _number(Decimal(str(value)))
    return json.dumps(value)


def _number(value: Decimal) -> str:
    sign, digits, exponent = value.as_tuple()
    text = "".join(map(str, digits)).lstrip("0")
    if not text:
        return "0"
    short = text.rstrip("0")
    return f"{'-' if sign else ''}{short}e{int(exponent) + len(text) - len(short)}"


def _no(constant: str) -> Any:
    raise ValueError(f"{constant:.40} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a key twice")
    return made


def _message(value: Any, where: str) -> Message:
    if not isinstance(value, dict):
        raise Refused(400, f"{where} must be an object", param=where)
    role = value.get("role")
    if role not in ROLES:
        raise Refused(400, f"{where}.role must be one of {', '.join(ROLES)}", param=f"{where}.role")
    if value.get("function_call"):
        raise Refused(400, f"{where}.function_call is of an old interface; use tool_calls", param=where)
    reasoning = value.get("reasoning_content") or value.get("reasoning")
    return Message(
        role=role,
        content=_content(value.get("content"), f"{where}.content"),
        reasoning=_text(reasoning, f"{where}.reasoning_content"),
        tool_calls=_calls(value.get("tool_calls"), f"{where}.tool_calls"),
        tool_call_id=_text(value.get("tool_call_id"), f"{where}.tool_call_id"),
        name=_text(value.get("name"), f"{where}.name"),
    )


def _text(value: Any, where: str) -> str:
    if value is None or value == []:
        return ""
    if not isinstance(value, str):
        raise Refused(400, f"{where} must be text", param=where)
    return value


def _content(value: Any, where: str) -> str:
    """Text, or parts of text, which are one text after another."""
    if not isinstance(value, list):
        return _text(value, where)
    texts = []
    for number, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in ("text", "refusal"):
            raise Refused(400, f"{where}[{number}] is of type {kind!r:.40}; sessions know text alone", param=where)
        texts.append(_text(part.get(kind), f"{where}[{number}].{kind}"))
    return "".join(texts)


def _calls(value: Any, where: str) -> tuple[ToolCall, ...]:
    if not value:
        return ()
    if not isinstance(value, list):
        raise Refused(400, f"{where} must be a list", param=where)
    calls = []
    for number, one in enumerate(value):
        function = one.get("function") if isinstance(one, dict) else None
        if not isinstance(function, dict):
            raise Refused(400, f"{where}[{number}] must be a call of a function", param=where)
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = json.dumps(arguments, ensure_ascii=False)
        at = f"{where}[{number}]"
        name = _text(function.get("name"), f"{at}.function.name")
        calls.append(ToolCall(_text(one.get("id"), f"{at}.id"), name, _text(arguments, f"{at}.function.arguments")))
    return tuple(calls)
