"""What is appended to an answer is what the chat template writes there, and nobody's text becomes a control token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.agents.messages import Message, Refused, ToolCall
from megatron_dppo.agents.rendering import CannotContinue, ChatRenderer
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.prompting import encode_prompt
from tests.agents.families import FAMILIES, stop_ids, tokenizer_of
from tests.tiny import tiny_tokenizer

NAMES = sorted(FAMILIES)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Looks for a text.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        },
    }
]
LOOKALIKES = sorted({token for family in FAMILIES.values() for token in (*family.special, *family.added)})
TEXT = st.lists(st.text(max_size=8) | st.sampled_from([*LOOKALIKES, "\ue5ca", "\\ue000"]), max_size=5).map("".join)


def renderer_of(name: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(name), stop_token_ids=stop_ids(name))


def user(text: str) -> Message:
    return Message("user", text)


def tool(text: str) -> Message:
    return Message("tool", text, tool_call_id="c00000000")


CALL = Message("assistant", tool_calls=(ToolCall("c00000000", "search", '{"text": "x"}'),))


def text_after(name: str, answer: Message, new: list[Message], last: str, *, closed: bool = True) -> str:
    tokenizer = tokenizer_of(name)
    number = tokenizer.convert_tokens_to_ids(last)
    rendered = renderer_of(name).after(answer, new, TOOLS, {}, last=number, closed=closed)
    return str(tokenizer.decode(rendered.ids))


EXPECTED = {
    # name: (after a closed answer, after one cut short, after a call)
    "qwen3": (
        "\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\nT\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
    ),
    "llama3": (
        "<|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nU<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        '<|start_header_id|>ipython<|end_header_id|>\n\n"T"<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n',
    ),
    "glm4": (
        "<|user|>\nU<|assistant|>",
        "<|user|>\nU<|assistant|>",
        "<|observation|>\n<tool_response>\nT\n</tool_response><|assistant|>",
    ),
    "deepseek_v3_1": (
        "<｜User｜>U<｜Assistant｜></think>",
        "<｜end▁of▁sentence｜><｜User｜>U<｜Assistant｜></think>",
        "<｜tool▁output▁begin｜>T<｜tool▁output▁end｜>",
    ),
    "gpt_oss": (
        "<|start|>user<|message|>U<|end|><|start|>assistant",
        "<|end|><|start|>user<|message|>U<|end|><|start|>assistant",
        '<|start|>functions.search to=assistant<|channel|>commentary<|message|>"T"<|end|><|start|>assistant',
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_what_follows_an_answer(name: str) -> None:
    closed, cut, called = EXPECTED[name]
    end = FAMILIES[name].stops[0]
    assert text_after(name, Message("assistant", "A"), [user("U")], end) == closed
    assert text_after(name, Message("assistant", "A"), [user("U")], "a", closed=False) == cut
    assert text_after(name, CALL, [tool("T")], end) == called


def test_a_stop_token_that_is_the_next_role_is_not_written_twice() -> None:
    """GLM ends an answer with the token of who speaks next; where the model guessed wrong its token stays."""
    closed, _, called = EXPECTED["glm4"]
    assert "<|user|>" + text_after("glm4", Message("assistant", "A"), [user("U")], "<|user|>") == closed
    assert "<|observation|>" + text_after("glm4", CALL, [tool("T")], "<|observation|>") == called
    assert text_after("glm4", Message("assistant", "A"), [user("U")], "<|observation|>") == closed


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_with_an_answer_is_the_conversation_and_what_follows(name: str) -> None:
    """Where the model writes its answer as the template does, appending is the same as rendering all of it, but for
    what a template changes in its past: the closing of gpt-oss, the reasoning of Qwen3 and GLM."""
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    begin = {"glm4": "\n<think></think>\n", "gpt_oss": FAMILIES[name].answer}.get(name, "")
    first, new = [Message("system", "S"), user("U")], [user("V  "), Message("assistant", "B"), user("W")]
    stop = stop_ids(name)[1 if name == "glm4" else 0]
    sampled = [*tokenizer.encode(f"{begin}A a", add_special_tokens=False), stop]
    answer = Message("assistant", "A a")
    stored = [*renderer.conversation(first, TOOLS, {}).ids, *sampled]
    stored += list(renderer.after(answer, new, TOOLS, {}, last=stop, closed=True).ids)
    whole = list(renderer.conversation([*first, answer, *new], TOOLS, {}).ids)
    if name == "gpt_oss":
        differ = [n for n, (a, b) in enumerate(zip(stored, whole, strict=True)) if a != b]
        assert [(stored[n], whole[n]) for n in differ] == [(stop, tokenizer.convert_tokens_to_ids("<|end|>"))]
    else:
        assert stored == whole


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT, told=TEXT)
@settings(max_examples=60)
def test_nobodys_text_becomes_a_control_token(name: str, text: str, told: str) -> None:
    renderer, tokenizer = renderer_of(name), tokenizer_of(name)
    control = set(tokenizer.added_tokens_decoder)

    def controls(ids: Any) -> list[int]:
        return [int(one) for one in ids if int(one) in control]

    def begun(words: str) -> np.ndarray:
        return renderer.conversation([Message("system", "S"), user(words)], TOOLS, {}).ids

    def gone_on(words: str, more: str) -> np.ndarray:
        return renderer.after(CALL, [tool(words), user(more)], TOOLS, {}, last=stop_ids(name)[0], closed=True).ids

    assert controls(begun(text)) == controls(begun("U"))
    assert controls(gone_on(text, told)) == controls(gone_on("T", "U"))
    assert text.strip() in tokenizer.decode(begun(text))
    assert told.strip() in tokenizer.decode(gone_on(text, told))


def test_a_message_that_a_template_writes_elsewhere_is_not_lost() -> None:
    """DeepSeek's template moves every system prompt to the front: it cannot be appended."""
    with pytest.raises(CannotContinue, match="does not show a system's message behind an answer"):
        text_after("deepseek_v3_1", Message("assistant", "A"), [Message("system", "S"), user("U")], "a", closed=False)
    assert "S<|im_end|>" in text_after("qwen3", Message("assistant", "A"), [Message("system", "S"), user("U")], "a")


def test_reasoning_that_the_template_opened() -> None:
    renderer = renderer_of("deepseek_v3_1")
    assert renderer.conversation([user("U")], None, {"thinking": True}).thinking
    assert not renderer.conversation([user("U")], None, {}).thinking


def test_what_a_template_refuses() -> None:
    renderer = renderer_of("llama3")
    two = Message("assistant", tool_calls=CALL.tool_calls * 2)
    with pytest.raises(Refused, match="only supports single tool-calls"):
        renderer.conversation([user("U"), two, tool("T")], TOOLS, {})
    with pytest.raises(Refused, match="half of a surrogate pair"):
        renderer.conversation([user("\ud800")], None, {})
    with pytest.raises(CannotContinue, match="no previous assistant message with a tool call"):
        text_after("gpt_oss", Message("assistant", "A"), [tool("T")], "a")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="has no chat template"):
        ChatRenderer(tokenizer, stop_token_ids=[1])


def test_a_template_without_control_tokens_goes_on_too() -> None:
    tokenizer = tiny_tokenizer()
    renderer = ChatRenderer(tokenizer, stop_token_ids=[1])
    rendered = renderer.after(Message("assistant", "A"), [user("U <eos>")], None, {}, last=1, closed=True)
    assert tokenizer.decode(rendered.ids) == "\nuser: U <eos>\nassistant:"
    assert 1 not in rendered.ids


@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT)
@settings(max_examples=30)
def test_the_question_of_a_task_is_no_control_token_either(name: str, text: str) -> None:
    """Tags (<think>) may be named in a prompt; what is written as a control token is none, also where the tokenizer
    does not call it special, as DeepSeek's."""
    tokenizer = tokenizer_of(name)
    control = {number for number, token in tokenizer.added_tokens_decoder.items() if token.content[:2] in ("<|", "<｜")}
    config = TaskConfig(dataset="chain_sum", prompt="{question}", chat_template=True)

    def controls(words: str) -> list[int]:
        return [int(one) for one in encode_prompt(config, tokenizer, words)[0] if int(one) in control]

    assert controls(text) == controls("U")


@pytest.mark.timeout(300)
def test_no_text_takes_long_to_guard() -> None:
    """Some tokenizers have a thousand control tokens, and a page may consist of what they begin with."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [f"<|reserved_{n}|>" for n in range(1000)]})
    renderer = ChatRenderer(tokenizer, stop_token_ids=[1])
    for text in ("<" * 500_000, "<|reserved_" * 50_000, "".join(map(chr, range(0xE000, 0xF8FF))) * 10):
        words = renderer.conversation([user(text)], None, {}).ids
        assert tokenizer.decode(words[6:-11]) == text
    marks = "".join(f"ANSWER{n}END" for n in range(20_000))
    after = renderer.after(Message("assistant", "A"), [user(marks)], None, {}, last=1, closed=True).ids
    assert tokenizer.decode(after) == f"\nuser: {marks}\nassistant:"
    with pytest.raises(Refused, match="every character for private use"):
        renderer.conversation([user("".join(map(chr, range(0xE000, 0xF900))))], None, {})
