"""The tree of turns against a search through all of them, for conversations that grow, are edited and come again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import event, given, settings
from hypothesis import strategies as st

from megatron_dppo.agents.history import History, TurnRecord
from megatron_dppo.agents.messages import Message
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from tests.agents.recorder import Recorder
from tests.agents.test_exact import check_rows

TEXTS = st.sampled_from(["", "a", "b", "a "])
STEP = st.tuples(
    st.integers(0, 7),  # the conversation that is gone on from; beyond those that there are: none
    st.integers(0, 9),  # of its messages, which one is edited; most often none
    st.sampled_from(["", "", "r", "s"]),  # the reasoning that is sent back
    TEXTS,  # what is said next
    TEXTS,  # what is answered
    st.integers(0, 4),  # 0: the answer is not trained on, and tools are others
)


@given(st.lists(STEP, min_size=2, max_size=10))
@settings(max_examples=300)
def test_the_longest_history(steps: list[tuple[int, int, str, str, str, int]]) -> None:
    history, recorder = History("s"), Recorder(lambda rng, request: [*rng.integers(2, 9, 3)], [])
    known: list[tuple[bool, list[Message], list[int]]] = []
    given: dict[int, list[RolloutBatch]] = {}
    for number, (gone_on, edited, reasoning, said, answered, chance) in enumerate(steps):
        other = chance == 0
        messages = list(known[gone_on][1]) if gone_on < len(known) else []
        messages = [replace(m, reasoning=reasoning) if m.role == "assistant" else m for m in messages]
        if edited < len(messages):
            messages[edited] = replace(messages[edited], content="a")
        messages.append(Message("user", said))
        found = history.longest([other], messages)
        fits = [(told, ids) for kind, told, ids in known if kind == other and begins(messages, told)]
        longest = max((len(told) for told, _ in fits), default=0)
        expected = next((ids for told, ids in reversed(fits) if len(told) == longest), None)
        assert (found.ids.tolist() if found else None) == expected
        event("found" if found else "none found")
        event("a branch" if found and not found.is_last else "no branch")
        prompt = np.array([*(expected or []), 100 + number], dtype=np.int32)
        branch = history.branch_for(found)
        recorded = branch.recorded
        request = GenerationRequest(request_id=str(number), prompt_ids=prompt, seed=number, known=recorded)
        batch = recorder(request, SamplingConfig(max_tokens=3, top_k_logprobs=2), True)
        answer = Message("assistant", answered, "r")
        record = TurnRecord(
            number=number, asked=(), answer=answer, started=0, ended=0, prompt=len(prompt), sampled=3,
            finish_reason="length", why_not="other" if other else "", rendered_anew="",
        )  # fmt: skip
        history.add(branch, record, prompt, batch, closed=False, root=[other], messages=(*messages, answer))
        branch.under_way = False
        given[number] = [recorder.given[str(number)]]
        known.append((other, [*messages, answer], given[number][0].token_ids.tolist()))
    branches, turns = history.samples({})
    assert [turn.number for turn in turns] == list(range(len(steps)))
    assert sum(int(branch.loss_mask.sum()) for branch in branches) == 3 * sum(turn.trained for turn in turns)
    names = [branch.request_ids[0] for branch in branches]
    assert names == [f"s+{n}" if n else "s" for n in range(len(branches))]
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
