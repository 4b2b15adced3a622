"""When two messages are the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.agents.messages import Refused, canonical, digests, read_messages

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=3), inside, max_size=3),
    max_leaves=8,
)


def one(**message: Any) -> Any:
    return read_messages([{"role": "assistant"} | message])[0]


def call(arguments: Any, **fields: Any) -> Any:
    return one(tool_calls=[{"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}} | fields])


@given(JSON)
def test_arguments_are_compared_as_values(value: Any) -> None:
    compact, spaced = json.dumps(value, sort_keys=True), json.dumps(value, indent=3, ensure_ascii=False)
    assert canonical(compact) == canonical(spaced)


@given(JSON, JSON)
def test_arguments_that_differ_are_not_the_same(first: Any, second: Any) -> None:
    def plain(value: Any) -> Any:  # 1 == True in Python, and not in JSON
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return [plain(v) for v in value] if isinstance(value, list) else (isinstance(value, bool), value)

    assert (canonical(json.dumps(first)) == canonical(json.dumps(second))) == (plain(first) == plain(second))


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ('{"a": 1.0}', '{"a": 1}', True),
        ('{"a": 100}', '{"a": 1e2}', True),
        ('{"a": -0.0}', '{"a": 0}', True),
        ('{"a": 0.1}', '{"a": 0.10000000000000001}', False),
        ('{"a": true}', '{"a": 1}', False),
        ('{"a": "\\u00e9"}', '{"a": "é"}', True),
        ('{"a": " b"}', '{"a": "b"}', False),
        ('{"a": 1, "a": 2}', '{"a": 2}', False),
        ('{"a": NaN}', '{"a":NaN}', False),
        ("{'a': 1}", "{'a':1}", False),
        ('{"a": 1', '{"a": 1', True),
        ("[" * 100_000, "[" * 100_000, True),
        ('{"a": 1e400000000}', '{"a": 10e399999999}', True),
        ("{}", "", False),
    ],
)
def test_what_is_the_same_call(first: str, second: str, same: bool) -> None:
    assert (call(first).key == call(second).key) is same


def test_nothing_is_nothing_however_it_is_said() -> None:
    plain = one(content="x")
    assert one(content="x", tool_calls=None, reasoning_content="", name=None, refusal=None, anything=[1]) == plain
    assert one(content=[{"type": "text", "text": "x"}], tool_calls=[]) == plain
    assert one(content=None) == one(content="") == one(content=[]) == one()
    assert call("{}", index=3) == call("{}")
    assert call({"a": 1}).key == call('{"a":1}').key


def test_every_character_of_content_counts() -> None:
    keys = {
        one(content=text).key for text in ("x", "x ", " x", "x\n", "X", "x\u200b", "é", "e\u0301", "\ud800", "\ufffd")
    }
    assert len(keys) == 10
    assert one(content="x", reasoning_content="r").key == one(content="x").key
    with_reasoning = one(content="x", reasoning="r")
    assert with_reasoning.same_reasoning(one(content="x"))
    assert with_reasoning.same_reasoning(one(content="x", reasoning_content="r"))
    assert not with_reasoning.same_reasoning(one(content="x", reasoning_content="R"))


def test_digests_depend_on_all_before() -> None:
    said = read_messages([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
    whole = digests([None], said)
    assert len(whole) == 3
    assert whole[1] == digests([None], said[:1])[-1]
    assert digests([None], said[1:])[-1] not in whole
    assert digests([[]], said)[-1] != whole[-1]
    joined = read_messages([{"role": "user", "content": "ab"}])
    assert digests([None], joined)[-1] not in whole


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (None, "messages must be a list"),
        ([], "messages must be a list"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"role": "robot"}], r"messages\[0\].role must be one of"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "is of type 'image_url'; sessions know text alone"),
        ([{"role": "user", "content": [3]}], "is of type None"),
        ([{"role": "assistant", "function_call": {"name": "f"}}], "old interface"),
        ([{"role": "assistant", "tool_calls": [{"id": "a"}]}], r"tool_calls\[0\] must be a call of a function"),
        ([{"role": "assistant", "tool_calls": "x"}], "tool_calls must be a list"),
        ([{"role": "tool", "tool_call_id": 3}], "tool_call_id must be text"),
    ],
)  # fmt: skip
def test_what_is_no_message(messages: Any, said: str) -> None:
    with pytest.raises(Refused, match=said) as caught:
        read_messages(messages)
    assert caught.value.status == 400
