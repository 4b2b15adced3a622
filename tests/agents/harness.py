"""A harness that does everything harnesses do, at random, through the official client, and knows by itself which answer
each of its requests goes on from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openai

from megatron_dppo.agents.sessions import Session
from megatron_dppo.rollout.engine import GenerationRequest
from tests.agents.families import FAMILIES, stop_ids, tokenizer_of
from tests.agents.test_rendering import LOOKALIKES, TOOLS

WORDS = ["the", " weather", " is", "\n", "  ", " 42", "naïve", " café", "東京", "🦊", "👩\u200d👧", "e\u0301", "\u200b",
         "\ufffd", '"', "\\n", "{", "}", "\t", "ﬁ", "\r\n", " Paris", "'", "ÿ", "𝔘", "<", "|>"]  # fmt: skip
STOPS = ["é", "🦊", "the", " ", "\ufffd", "東", "42", "}", "\n"]


def random_text(rng: np.random.Generator, most: int = 12) -> str:
    pool = WORDS if rng.random() < 0.7 else [*WORDS, *LOOKALIKES]
    return "".join(pool[int(n)] for n in rng.integers(0, len(pool), rng.integers(1, most)))


def writer(name: str, *, plain: bool = False) -> Any:
    """Answers of a family: words, calls, and, unless `plain`, ids that no tokenizer makes of any text."""
    family, tokenizer, stops = FAMILIES[name], tokenizer_of(name), stop_ids(name)
    others = np.setdiff1d(np.arange(len(tokenizer)), stops)
    ordinary = np.setdiff1d(others, list(tokenizer.added_tokens_decoder))

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    def write(rng: np.random.Generator, request: GenerationRequest) -> list[int]:
        kind = rng.uniform(0.4 if plain else 0, 1)
        end = [int(rng.choice(stops))]
        begin = encode(family.answer) if rng.random() < 0.8 else []
        if kind < 0.3:
            return begin + [int(n) for n in rng.choice(ordinary, rng.integers(1, 30))] + end
        if kind < 0.4:
            return begin + [int(n) for n in rng.choice(others, rng.integers(1, 30))] + end
        if kind < 0.65:
            text = json.dumps(random_text(rng), ensure_ascii=bool(rng.random() < 0.5))[1:-1]
            if name == "glm4":
                text = text.replace("<", "(")
            before = [] if name in ("llama3", "gpt_oss") else begin + encode(random_text(rng, 3))
            return before + encode(family.call.format(text=text)) + end
        return begin + encode(random_text(rng)) + end

    return write


@dataclass
class Sent:
    """A request that was answered. `goes_on` is the number of the turn whose answer it is the next after."""

    number: int
    goes_on: int | None
    messages: list[dict[str, Any]]
    stop: list[str]


@dataclass
class Harness:
    session: Session
    rng: np.random.Generator
    plain: bool = False
    """Whether answers end by themselves."""
    sent: list[Sent] = field(default_factory=list)
    did: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._client = openai.OpenAI(base_url=self.session.base_url, api_key=self.session.api_key, max_retries=0)
        self._messages: list[dict[str, Any]] = []
        self._alive: list[tuple[int, int]] = []  # messages up to an answer of ours, and its turn
        self._last: Any = None

    def close(self) -> None:
        self._client.close()

    def turn(self) -> None:
        self._say()
        options: dict[str, Any] = {"tools": TOOLS}
        stop: list[str] = []
        if self.rng.random() < 0.2 and not self.plain:
            options["max_tokens"] = int(self.rng.integers(1, 12))
        if self.rng.random() < 0.2 and not self.plain:
            options["stop"] = stop = [
                str(one) for one in self.rng.choice(STOPS, self.rng.integers(1, 3), replace=False)
            ]
        if self.rng.random() < 0.15:
            options["stream"] = True
            self.did["streamed"] += 1
        try:
            number, message, reason = self._ask(options)
        except openai.BadRequestError as error:
            if error.code != "chat_template":  # what the model's template cannot say
                raise
            self.did["refused by the template"] += 1
            self._start()
            return
        goes_on = self._alive[-1][1] if self._alive else None
        self.sent.append(Sent(number, goes_on, json.loads(json.dumps(self._messages)), stop))
        self.did[f"ended by {reason}"] += 1
        if self.rng.random() < 0.08:
            again = self._ask(options | {"extra_headers": {"x-stainless-retry-count": "1"}})
            assert again == (number, message, reason)
            self.did["retried"] += 1
        self._messages.append(message)
        self._alive.append((len(self._messages), number))

    def _start(self) -> None:
        self._messages, self._alive = [], []
        if self.rng.random() < 0.5:
            self._messages.append({"role": "system", "content": random_text(self.rng)})

    def _say(self) -> None:
        draw = self.rng.random()
        if not self._messages or draw < 0.03:
            self.did["began anew"] += bool(self._messages)
            self._start()
        elif draw < 0.12 and len(self._messages) > 1:
            self._edit()
        calls = self._messages[-1].get("tool_calls") if self._messages else None
        for call in calls or ():
            content = random_text(self.rng)
            self._messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
            self.did["answers of tools"] += 1
        if not calls or self.rng.random() < 0.2:
            self._messages.append({"role": "user", "content": random_text(self.rng)})

    def _edit(self) -> None:
        """Another text in the past, with all that came after it or without."""
        place = int(self.rng.integers(0, len(self._messages)))
        if not self._messages[place].get("content"):
            return
        edited = {**self._messages[place], "content": self._messages[place]["content"] + random_text(self.rng, 3)}
        self._messages[place] = edited
        if self.rng.random() < 0.5:
            self._messages = self._messages[: place + 1]
        self._alive = [one for one in self._alive if one[0] <= place]
        self.did["edited"] += 1

    def _ask(self, options: dict[str, Any]) -> tuple[int, dict[str, Any], str]:
        """Number of the turn, the message as a harness keeps it, and why it ended."""
        made = self._client.chat.completions.create(model="any", messages=self._messages, **options)  # type: ignore[call-overload]
        if options.get("stream"):
            pieces = list(made)
            said, reason = pieces[0].choices[0].delta, pieces[-1].choices[0].finish_reason
        else:
            pieces = [made]
            said, reason = made.choices[0].message, made.choices[0].finish_reason
        message: dict[str, Any] = {"role": "assistant", "content": said.content}
        if said.reasoning_content and options.get("stream"):
            message["reasoning_content"] = said.reasoning_content
        if said.tool_calls:
            message["tool_calls"] = [
                {"id": c.id, "type": "function", "function": {"name": c.function.name, "arguments": _spaced(c)}}
                for c in said.tool_calls
            ]
        return int(pieces[0].id.rsplit("/", 1)[1]), message, reason


def _spaced(call: Any) -> str:
    """The arguments as another serializer writes them."""
    return json.dumps(json.loads(call.function.arguments), indent=1, ensure_ascii=False)
