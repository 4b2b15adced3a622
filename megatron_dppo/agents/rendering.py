"""From messages to token ids, by the model's own chat template, without ever rendering what was sampled.

```
stored ids:  prompt ........ | sampled ......... <|im_end|>                       (never tokenised again)
rendered:    user: ?  assistant: MARK <|im_end|>\\n<|im_start|>user\\n...<|im_start|>assistant\\n
                                      └──────── what follows MARK ────────────────────────────┘
appended:                                  \\n<|im_start|>user\\n...<|im_start|>assistant\\n   (new ids)
```
Templates write an answer differently once others follow it (Qwen3 drops its reasoning, gpt-oss its closing token), so a
conversation and its extension are no texts of which one begins the other. What follows an answer is the same for all
answers of its kind: it is taken from a conversation of two messages, with a mark where the answer's text ends.
"""

from __future__ import annotations

import datetime
import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_dppo.agents.messages import Message, Refused, call_object
from megatron_dppo.errors import UserError
from megatron_dppo.tasks.prompting import encode_text, is_control, render

_PRIVATE = range(0xE000, 0xF900)
_ESCAPED = re.compile(r"\\u([ef][0-9a-f]{3})")
"""One of them in JSON, as a character or as what spells it there."""
_ASKED = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Rendered:
    ids: np.ndarray
    """int32"""
    thinking: bool
    """Whether the text ends inside of reasoning that the template opened."""


class CannotContinue(Exception):
    """The template does not show what follows an answer; the conversation has to be rendered anew."""


class ChatRenderer:
    """The chat template of a tokenizer. Methods may be called from several threads."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: Iterable[int],
        date: datetime.date | None = None,
    ) -> None:
        """
        stop_token_ids  that end an answer
        date            of a clock that the template asks
        """
        self._tokenizer, self._date, self._lock = tokenizer, date, threading.Lock()
        try:
            self._template = str(tokenizer.get_chat_template(tools=[{}]))
        except ValueError:
            raise UserError(
                "the model's tokenizer has no chat template, so a harness cannot talk to it; use a model that has one"
            ) from None
        added = tokenizer.added_tokens_decoder
        self.added = {token.content: number for number, token in added.items()}
        self._hidden = {number: token.content for number, token in added.items() if token.special}
        self._stops = [added[number].content for number in stop_token_ids if number in added]
        special = [token.content for token in added.values() if is_control(token)]
        written = [token.content for token in added.values() if token.content in self._template]
        self._special, self._control = _starts_of(special), _starts_of([*special, *written])
        self._leading = re.compile("|".join(map(re.escape, sorted(self.added, key=len, reverse=True))) or r"(?!)")
        self._as_text = self._wants_text()

    @property
    def template(self) -> str:
        return self._template

    def conversation(self, messages: Sequence[Message], tools: Any, given: Mapping[str, Any]) -> Rendered:
        """All of a conversation, up to where the assistant begins. Raises `Refused` with the template's reason."""
        guard, mark = self._guard(messages, tools)
        shown = [self._shown(message, guard(message.role)) for message in messages]
        try:
            text = self._render(shown, _strings(tools, guard("system")), given)
        except UserError as error:
            raise Refused(400, str(error), code="chat_template", param="messages") from None
        return self._rendered(text, mark, continues=False)

    def after(
        self,
        answer: Message,
        new: Sequence[Message],
        tools: Any,
        given: Mapping[str, Any],
        *,
        last: int,
        closed: bool,
    ) -> Rendered:
        """What follows the ids of an answer: its closing, unless the model wrote one, `new` messages, and the opening
        of the next answer.

        last    the answer's last id
        closed  whether that is a stop token. It closes the answer also where the template has another token there
                (gpt-oss ends a message with <|return|>, which is <|end|> in a history): nothing sampled is replaced.

        Raises `CannotContinue` where the template leaves the answer or one of `new` out, or writes it elsewhere.
        """
        guard, mark = self._guard(new, tools)
        said = [_ASKED, self._marked(answer, here := _unused(new))]
        shown = [self._shown(message, guard(message.role)) for message in new]
        guarded_tools = _strings(tools, guard("system"))
        try:
            text = _behind(here, self._render([*said, *shown], guarded_tools, given))
            alone = _behind(here, self._render(said, guarded_tools, given, opening=False))
        except UserError as error:
            raise CannotContinue(str(error)) from None
        if answer.tool_calls:  # behind the mark is the rest of the call first
            text, alone = self._behind_calls(text, alone)
        if closed:
            text = self._without_closing(text, alone, last)
        _check_shown(shown, text)
        return self._rendered(text, mark, continues=True)

    def spell(self, ids: Sequence[int] | np.ndarray, *, keep: frozenset[str] = frozenset()) -> str:
        """The text of sampled ids, without special tokens but those to `keep`."""
        left = [n for n in map(int, ids) if n not in self._hidden or self._hidden[n] in keep]
        with self._lock:
            return str(self._tokenizer.decode(left, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _rendered(self, text: str, mark: str, *, continues: bool) -> Rendered:
        text = text.replace(f"\\u{ord(mark):04x}", mark)  # a template may write JSON in ASCII
        try:
            with self._lock:
                ids = encode_text(self._tokenizer, text, continues=continues, mark=mark)
        except UserError as error:
            raise Refused(400, str(error), param="messages") from None
        return Rendered(ids, text.rstrip().endswith("<think>"))

    def _render(self, shown: Sequence[Any], tools: Any, given: Mapping[str, Any], *, opening: bool = True) -> str:
        every = {**given, "chat_template": self._template, "tools": tools or None}
        return render(self._tokenizer, shown, date=self._date, opening=opening, given=every)

    def _guard(self, messages: Sequence[Message], tools: Any) -> tuple[Callable[[str], Callable[[str], str]], str]:
        """A function of a role that makes one which marks where the text of a control token is to be cut, and the mark.
        Users and tools cannot write what the template writes; the harness's own words can name tags (<think>)."""
        everything = json.dumps([[m.content, m.reasoning, m.name, str(m.tool_calls)] for m in messages] + [tools])
        used = set(_ESCAPED.findall(everything))
        mark = next((chr(n) for n in _PRIVATE if f"{n:04x}" not in used), "")
        if not mark:
            raise Refused(400, "the messages have every character for private use", param="messages")

        def guard(role: str) -> Callable[[str], str]:
            starts = self._control if role in ("user", "tool") else self._special
            return lambda text: starts.sub(lambda found: found[0] + mark, text)

        return guard, mark

    def _shown(self, message: Message, guard: Callable[[str], str]) -> dict[str, Any]:
        """The message as templates know it."""
        role = message.role
        if role == "developer" and "developer" not in self._template:
            role = "system"
        shown: dict[str, Any] = {"role": role, "content": guard(message.content)}
        if message.reasoning:
            field = "reasoning_content" if "reasoning_content" in self._template else "thinking"
            shown[field] = guard(message.reasoning)
        if message.tool_calls:
            calls = [(call.id, call.name, self._arguments(call.arguments)) for call in message.tool_calls]
            shown["tool_calls"] = [call_object(*_strings(list(call), guard)) for call in calls]
        for field in ("tool_call_id", "name"):
            if getattr(message, field):
                shown[field] = guard(getattr(message, field))
        return shown

    def _marked(self, answer: Message, here: str) -> dict[str, Any]:
        """An answer of the same kind, whose text is the mark."""
        if not answer.tool_calls:
            return {"role": "assistant", "content": here}
        calls = [
            call_object(call.id, call.name, self._arguments(json.dumps({here: here}))) for call in answer.tool_calls
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def _arguments(self, text: str) -> Any:
        if self._as_text:
            return text
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            return text
        return value if isinstance(value, dict) else text

    def _wants_text(self) -> bool:
        """Whether the template takes arguments of calls as text alone (DeepSeek-V3) rather than as an object."""
        for arguments in ({"a": "b"}, '{"a": "b"}'):
            said: dict[str, Any] = {"role": "assistant", "content": ""}
            said["tool_calls"] = [call_object("call00001", "f", arguments)]
            try:
                render(self._tokenizer, [_ASKED, said], date=self._date, given={"chat_template": self._template})
            except UserError:
                continue
            return isinstance(arguments, str)
        return False

    def _behind_calls(self, text: str, alone: str) -> tuple[str, str]:
        """Both without the rest of the calls' own text: it ends before the last stop token that they share, or, where
        the template closes no answer (GLM), where they begin to differ."""
        same = next(
            (n for n, (a, b) in enumerate(zip(text, alone, strict=False)) if a != b), min(len(text), len(alone))
        )
        cut = max((at for stop in self._stops if (at := text.rfind(stop, 0, same)) >= 0), default=same)
        if cut == same:  # a stop token that nobody named is a special one at the end
            shared = text[:same].rstrip()
            cut = next((len(shared) - len(t) for t in self._hidden.values() if shared.endswith(t)), same)
        return text[cut:], alone[cut:]

    def _without_closing(self, text: str, alone: str, last: int) -> str:
        """`text` without the token that closes the answer before it: it is closed. A template that closes none (GLM:
        the next message's role does) goes on with a role, which the model may have written as its stop token."""
        found = self._leading.match(stripped := text.lstrip())
        if found is None:
            return text
        if self.added[found[0]] == last or self._leading.match(alone.lstrip()):
            return stripped[found.end() :]
        return text


def _starts_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """The first characters of tokens, wherever one begins: cut behind it, no piece holds one. A token of one character
    is nothing that could be cut. Tokens share beginnings in the pattern: some tokenizers have a thousand."""
    begun: dict[str, set[str]] = {}
    for token in tokens:
        if len(token) > 1:
            begun.setdefault(token[0], set()).add(token[1:])
    return re.compile("|".join(f"{re.escape(c)}(?={_any_of(rest)})" for c, rest in sorted(begun.items())) or r"(?!)")


def _any_of(texts: set[str]) -> str:
    """A pattern that matches where one of the texts begins."""
    if "" in texts:
        return ""
    begun: dict[str, set[str]] = {}
    for text in texts:
        begun.setdefault(text[0], set()).add(text[1:])
    return f"(?:{'|'.join(re.escape(c) + _any_of(rest) for c, rest in sorted(begun.items()))})"


def _strings(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with all its strings changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_strings(one, change) for one in value]
    if isinstance(value, dict):
        return {change(key): _strings(one, change) for key, one in value.items()}
    return value


def _unused(messages: Sequence[Message]) -> str:
    everything = "".join(f"{m.content}{m.reasoning}{m.tool_calls}" for m in messages)
    used = set(re.findall(r"ANSWER(\d+)END", everything))
    return next(f"ANSWER{n}END" for n in range(len(used) + 1) if str(n) not in used)


def _behind(mark: str, text: str) -> str:
    _, found, behind = text.rpartition(mark)
    if not found:
        raise CannotContinue("the chat template does not show an assistant's message as it is")
    return behind


def _check_shown(shown: Sequence[Mapping[str, Any]], text: str) -> None:
    """Every message of users, tools and systems is there, in order. Templates trim them, or write them as JSON."""
    at = 0
    for message in shown:
        content = message["content"].strip()
        if message["role"] == "assistant" or not content:
            continue
        spellings = (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1])
        found = [place + len(s) for s in spellings if (place := text.find(s, at)) >= 0]
        if not found:
            raise CannotContinue(f"the chat template does not show a {message['role']}'s message behind an answer")
        at = min(found)
