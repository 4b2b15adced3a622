"""The tree of turns against a search through all of them, for conversations that grow, are edited and come again."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dppo.agents.history import History, TurnRecord
from megatron_dppo.agents.messages import Message, read_messages
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from tests.agents.recorder import Recorder
from tests.agents.test_exact import check_rows

TEXTS = st.sampled_from(["", "a", "b", "a ", "ab"])


@st.composite
def requests(draw: st.DrawFn) -> list[tuple[list[Message], bool, int]]:
    """Messages of requests, whether the answer is trained on, and which tools. Few texts: conversations meet."""
    made = []
    for _ in range(draw(st.integers(1, 8))):
        count = draw(st.integers(1, 4))
        messages = [{"role": role, "content": draw(TEXTS)} for role in ["user", "assistant"] * 3]
        for message in messages[1::2]:
            message["reasoning"] = draw(st.sampled_from(["", "r", "s"]))
        made.append(
            (list(read_messages(messages[: 2 * count - 1])), draw(st.integers(0, 3)) > 0, draw(st.integers(0, 1)))
        )
    return made


@given(requests(), st.lists(TEXTS, min_size=8, max_size=8), st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_longest_history(asked: list[tuple[list[Message], bool, int]], answers: list[str], reasons: bool) -> None:
    history, recorder = History("s"), Recorder(lambda rng, request: [*rng.integers(2, 9, 3)], [])
    known: list[tuple[int, list[Message], list[int]]] = []
    given: dict[int, list[RolloutBatch]] = {}
    for number, (messages, trained, tools) in enumerate(asked):
        found = history.longest([tools], messages)
        fits = [(said, ids) for kind, said, ids in known if kind == tools and begins(messages, said)]
        longest = max((len(said) for said, _ in fits), default=0)
        expected = next((ids for said, ids in reversed(fits) if len(said) == longest), None)
        assert (found.ids.tolist() if found else None) == expected
        prompt = np.array([*(expected or []), 100 + number], dtype=np.int32)
        request = GenerationRequest(request_id=str(number), prompt_ids=prompt, seed=number)
        batch = recorder(request, SamplingConfig(max_tokens=3, top_k_logprobs=2), True)
        answer = Message("assistant", answers[number], "r" if reasons else "")
        record = TurnRecord(
            number=number, asked=(), answer=answer, started=0, ended=0, prompt=len(prompt), sampled=3,
            finish_reason="length", why_not="" if trained else "other", rendered_anew="",
        )  # fmt: skip
        history.add(found, record, batch, closed=False, root=[tools], messages=(*messages, answer))
        known.append((tools, [*messages, answer], batch.token_ids.tolist()))
        given[number] = [batch]
    branches, turns = history.samples({})
    assert [turn.number for turn in turns] == list(range(len(asked)))
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == 3 * sum(turn.trained for turn in turns)
    assert [branch.request_ids[0] for branch in branches] == ["s", *(f"s+{n}" for n in range(1, len(branches)))][
        : len(branches)
    ]
    for number, branch in enumerate(branches):
        check_rows(branch, [turn for turn in turns if turn.branch == number and turn.trained], given)


def begins(messages: list[Message], said: list[Message]) -> bool:
    """Whether `messages` begin with a conversation, compared field by field."""
    if len(said) > len(messages):
        return False
    for mine, sent in zip(said, messages, strict=False):
        if (mine.role, mine.content, mine.tool_calls) != (sent.role, sent.content, sent.tool_calls):
            return False
        if sent.reasoning and sent.reasoning != mine.reasoning:
            return False
    return True
