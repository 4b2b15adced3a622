"""How requests are cut into work, and what a ticket takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_dppo.rollout.engine import GenerationRequest, SamplingConfig
from megatron_dppo.rollout.fleet.replica import best_for
from megatron_dppo.rollout.fleet.work import Ticket, in_pieces

SAMPLING = SamplingConfig(max_tokens=10)


def asked(sizes: list[int]) -> list[GenerationRequest]:
    return [
        GenerationRequest(request_id=f"{g}/{s}", prompt_ids=np.array([g, 7], dtype=np.int32), seed=s)
        for g, size in enumerate(sizes)
        for s in range(size)
    ]


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 9))
def test_pieces_hold_whole_groups_in_order(sizes: list[int], most: int) -> None:
    requests = asked(sizes)
    pieces = in_pieces(requests, most)
    assert [r.request_id for piece in pieces for r in piece] == [r.request_id for r in requests]
    for piece in pieces:
        groups = {int(r.prompt_ids[0]) for r in piece}
        assert len(piece) == sum(sizes[g] for g in groups)
        assert len(piece) <= most or len(groups) == 1
    for one, other in pairwise(pieces):  # no room was left
        assert len(one) + sizes[int(other[0].prompt_ids[0])] > most


def test_a_prompt_that_comes_twice_in_a_row_is_two_groups() -> None:
    requests = [r for r in asked([2]) for _ in range(2)]  # two groups of two with one prompt
    assert [len(piece) for piece in in_pieces(requests, 1)] == [4]
    assert [len(piece) for piece in in_pieces(requests, 1, samples=2)] == [2, 2]


def test_a_ticket_gives_results_in_the_order_asked_for_and_takes_none_twice() -> None:
    ticket = Ticket(in_pieces(asked([2, 2, 2]), 2), SAMPLING, training=True)
    first, second, third = ticket.work
    assert first.tokens == 2 * (2 + 10)
    ticket.deliver(third, "c")
    ticket.deliver(first, "a")
    with pytest.raises(RuntimeError, match="came twice"):
        ticket.deliver(third, "c")
    assert not ticket.closed
    assert (ticket.asked, ticket.answered) == (6, 4)
    ticket.deliver(second, "b")
    came: list[str] = []
    assert ticket.wait(came.append) == ["a", "b", "c"]
    assert came == ["c", "a", "b"]


def test_a_ticket_closes_when_enough_has_come_or_when_it_fails() -> None:
    enough = Ticket(in_pieces(asked([1, 1, 1]), 1), SAMPLING, training=True, enough=2)
    assert (enough.asked, enough.answered) == (2, 0)
    enough.deliver(enough.work[2], "c")
    enough.deliver(enough.work[0], "a")
    assert enough.closed
    assert enough.wait() == ["a", "c"]
    failed = Ticket(in_pieces(asked([1, 1]), 1), SAMPLING, training=True)
    failed.fail(ValueError("no"))
    failed.fail(KeyError("too late"))
    with pytest.raises(ValueError, match="no"):
        failed.wait()


def test_turns_of_a_session_go_to_one_engine_unless_it_has_much_more_to_do() -> None:
    replicas: Any = [SimpleNamespace(tokens=tokens, budget=400) for tokens in (300, 200, 250)]

    def sent(names: list[str], free: Any = replicas) -> Any:
        requests = [replace(r, affinity=name) for r, name in zip(asked([len(names)]), names, strict=True)]
        return best_for(Ticket([requests], SAMPLING, training=True).work[0], free, replicas)

    homes = [replicas.index(sent([f"session {n}"])) for n in range(300)]
    assert [homes.count(n) > 60 for n in range(3)] == [True] * 3
    assert homes == [replicas.index(sent([f"session {n}"] * 2)) for n in range(300)]
    assert sent([""]) is sent(["a", "b"]) is replicas[1]  # nothing in common
    name = f"session {homes.index(0)}"
    assert sent([name]) is replicas[0]
    assert sent([name], replicas[1:]) is replicas[1]
    replicas[0].tokens = 301
    assert sent([name]) is replicas[1]
