"""Nothing that was sampled is tokenised again, and what is trained on is the engines' own record, to the bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from megatron_dppo.agents.history import TurnRecord
from megatron_dppo.agents.messages import Refused, read_messages
from megatron_dppo.agents.server import SessionServer
from megatron_dppo.agents.sessions import SessionLimits, SessionRecord
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.rollout.engine import SamplingConfig
from tests.agents.families import FAMILIES, stop_ids, tokenizer_of
from tests.agents.harness import Harness, Sent, writer
from tests.agents.recorder import Recorder
from tests.agents.test_rendering import TOOLS, renderer_of

LIMITS = SessionLimits(max_turns=40, max_tokens=20_000, max_response_tokens=64, max_prompt_tokens=19_000)
TURNS_A_SESSION = 12


@dataclass
class Found:
    """turns, sampled, branches of all sessions
    again      sampled tokens of earlier turns that a request did not send to the engines as they were
    going_on   turns that go on from another, and `history`, the sampled tokens before all of them
    broken     those whose conversation, rendered anew, does not begin with the stored ids; `differ` counts the sampled
               tokens at and behind the first difference"""

    did: Counter[str] = field(default_factory=Counter)
    turns: int = 0
    sampled: int = 0
    branches: int = 0
    again: int = 0
    going_on: int = 0
    history: int = 0
    broken: int = 0
    differ: int = 0


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_some_hundred_turns(name: str) -> None:
    found = converse(name, 60)
    assert found.again == 0
    assert found.broken > 0


@pytest.mark.full
def test_ten_thousand_turns(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the tables of docs/sessions.md: answers drawn to break things, then such as a tokenizer spells itself."""
    for plain, turns in ((False, 2000), (True, 400)):
        for name in FAMILIES:
            found = converse(name, turns, plain=plain)
            assert found.again == 0
            with capsys.disabled():
                print(
                    f"\n| {name} | {found.turns:,} | {found.sampled:,} | {found.branches} | {found.again} | "
                    f"{found.broken:,} of {found.going_on:,} | {found.differ:,} of {found.history:,} |"
                )


def converse(name: str, turns: int, *, plain: bool = False) -> Found:
    recorder = Recorder(writer(name, plain=plain), stop_ids(name))
    server = SessionServer(recorder, tokenizer_of(name), stop_token_ids=stop_ids(name))
    found, rng = Found(), np.random.default_rng(len(name))
    try:
        while found.turns < turns:
            session_name = f"train/0/{found.turns}/0"
            session = server.open(
                session_name,
                sampling=SamplingConfig(top_k_logprobs=4),
                training=True,
                seed=lambda turn, at=found.turns: 1000 * at + turn,  # type: ignore[misc]
                limits=LIMITS,
            )
            harness = Harness(session, rng, plain)
            while len(harness.sent) < TURNS_A_SESSION:
                harness.turn()
            harness.close()
            record = session.finish()
            server.forget(session)
            check(name, session_name, record, harness, recorder, found)
    finally:
        server.close()
    return found


def check(name: str, session: str, record: SessionRecord, harness: Harness, recorder: Recorder, found: Found) -> None:
    turns = {turn.number: turn for turn in record.turns}
    sent = {one.number: one for one in harness.sent}
    assert sorted(turns) == sorted(sent)
    assert sum(turn.retries for turn in record.turns) == harness.did["retried"]
    pieces = {number: pieces_of(session, number, recorder) for number in turns}
    stored = {n: stored_ids(turns[n], pieces[n]) for n in turns}
    for number, one in sent.items():
        if one.goes_on is not None:
            sampled = np.zeros(len(stored[one.goes_on]), dtype=bool)
            earlier: int | None = one.goes_on
            while earlier is not None:
                sampled[turns[earlier].prompt : turns[earlier].prompt + turns[earlier].sampled] = True
                earlier = sent[earlier].goes_on
            prompt = pieces[number][0].token_ids[: turns[number].prompt]
            check_prompt(name, one, stored[one.goes_on], sampled, prompt, found)
        check_stop(name, one, turns[number], stored[number])
    for number, branch in enumerate(record.branches):
        mine = [turn for turn in record.turns if turn.branch == number]
        check_rows(branch, mine, pieces)
        assert np.array_equal(branch.token_ids, stored[mine[-1].number])
    assert all(turn.branch >= 0 for turn in record.turns)
    total = sum(turn.sampled for turn in record.turns)
    assert sum(int(branch.loss_mask.sum()) for branch in record.branches) == total
    found.did += harness.did
    found.turns, found.sampled = found.turns + len(turns), found.sampled + total
    found.branches += len(record.branches)


def pieces_of(session: str, number: int, recorder: Recorder) -> list[RolloutBatch]:
    """What the engines gave out for a turn, in order."""
    names = [f"{session}/{number}", *(f"{session}/{number}.{n}" for n in range(1, 100))]
    return [recorder.given[one] for one in names if one in recorder.given]


def stored_ids(turn: TurnRecord, pieces: list[RolloutBatch]) -> np.ndarray:
    return pieces[-1].token_ids[: turn.prompt + turn.sampled]


def check_prompt(
    name: str, sent: Sent, before: np.ndarray, sampled: np.ndarray, prompt: np.ndarray, found: Found
) -> None:
    """A request that goes on from an answer sends the engines the ids up to that answer's end, then others."""
    same = len(before) < len(prompt) and np.array_equal(prompt[: len(before)], before)
    found.again += 0 if same else int(sampled.sum())
    found.going_on += 1
    found.history += int(sampled.sum())
    try:
        anew = renderer_of(name).conversation(read_messages(sent.messages), TOOLS, {}).ids
    except Refused:  # a template may refuse its own model's answers
        found.broken += 1
        found.differ += int(sampled.sum())
        return
    both = min(len(anew), len(before))
    differ = np.flatnonzero(anew[:both] != before[:both])
    first = int(differ[0]) if len(differ) else both
    found.broken += first < len(before)
    found.differ += int(sampled[first:].sum())


def check_stop(name: str, sent: Sent, turn: TurnRecord, ids: np.ndarray) -> None:
    """An answer that a text ended holds it, and did not without its last token."""
    if not sent.stop or turn.finish_reason != "stop" or int(ids[-1]) in stop_ids(name):
        return
    tokenizer = tokenizer_of(name)
    shown = [n for n in ids[turn.prompt :] if not _special(name, int(n))]
    assert any(one in tokenizer.decode(shown) for one in sent.stop)
    assert not any(one in tokenizer.decode(shown[:-1]) for one in sent.stop if one != "\ufffd")


def _special(name: str, token: int) -> bool:
    return token in {tokenizer_of(name).convert_tokens_to_ids(one) for one in FAMILIES[name].special}


def check_rows(branch: RolloutBatch, turns: list[TurnRecord], pieces: dict[int, list[RolloutBatch]]) -> None:
    """Every row of a branch against what the engines gave out for its turns."""
    mask = np.zeros(len(branch.token_ids), dtype=bool)
    assert branch.routes is not None
    drawn = [(turn, piece) for turn in turns for piece in pieces[turn.number]]
    for turn, piece in drawn:
        rows = slice(int(piece.prompt_lengths[0]), min(len(piece.token_ids), turn.prompt + turn.sampled))
        mask[rows] = True
        for column in ("token_ids", "mu_logp", "topk_ids", "topk_logp", "weight_versions"):
            assert np.array_equal(getattr(branch, column)[rows], getattr(piece, column)[rows]), column
    assert np.array_equal(branch.loss_mask, mask)
    assert not branch.mu_logp[~mask].any()
    assert (branch.topk_ids[~mask] == -1).all()
    # The experts of a token: of the first forward that it went through.
    ends = [min(len(piece.token_ids), turn.prompt + turn.sampled) for turn, piece in drawn]
    begin = 0
    for (_, piece), end in zip(drawn, ends, strict=True):
        assert piece.routes is not None
        rows = slice(begin, end - 1)
        assert np.array_equal(branch.routes.experts[rows], piece.routes.experts[rows])
        assert branch.routes.valid[rows].all()
        begin = end - 1
    assert drawn[-1][1].routes is not None
    assert np.array_equal(branch.routes.valid[begin:], drawn[-1][1].routes.valid[begin : ends[-1]])
