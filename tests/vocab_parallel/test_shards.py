"""token_stats over 1, 2, 3 and 4 gloo ranks against the dense reference, all cases of a world in one start of ranks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_dppo.vocab_parallel import VocabShard, token_stats
from tests.distributed import run_ranks
from tests.vocab_parallel.dense import dense_stats, random_problem
from tests.vocab_parallel.reference import token_stats_from_logits

VOCAB = 53
# Each rank's first column, and the end: Megatron's even split with padding, uneven, one all padding, one empty.
LAYOUTS = {
    1: [[0, 56]],
    2: [[0, 28, 56], [0, 5, 53], [0, 53, 60]],
    3: [[0, 19, 38, 57], [0, 1, 52, 54], [0, 30, 53, 70], [0, 20, 20, 53]],
    4: [[0, 14, 28, 42, 56], [0, 30, 31, 50, 64], [0, 27, 54, 81, 108]],
}


def _outputs(rank: int, edges: list[int], layout: str, op: str, masked: bool) -> list[np.ndarray]:
    world = len(edges) - 1
    problem = random_problem(12, 6, edges[-1], VOCAB, 5, seed=edges[1])
    start, stop = edges[rank], edges[rank + 1]
    # Ids on the first and last row of every shard.
    border = [c for e in edges for c in (e - 1, e) if 0 <= c < VOCAB][:12]
    problem.token_ids[: len(border)] = torch.tensor(border)
    problem.topk_ids[: len(border), 2] = torch.tensor(border)
    shard = VocabShard(start, stop, VOCAB, dist.group.WORLD if world > 1 else None)
    weight = problem.weight.detach()[start:stop].clone().requires_grad_()
    hidden = problem.hidden.detach().clone()
    if layout == "sequence_sharded":
        hidden = hidden.chunk(world)[rank].clone()
    hidden.requires_grad_()
    mask = torch.arange(12) % 3 != 1 if masked else None
    if op == "reference":
        logits = hidden @ weight.t()
        got = token_stats_from_logits(logits, problem.token_ids, problem.topk_ids, shard=shard, temperature=0.8)
    else:
        got = token_stats(
            hidden,
            weight,
            problem.token_ids,
            problem.topk_ids,
            shard=shard,
            temperature=0.8,
            hidden_layout=layout,  # type: ignore[arg-type]
            loss_mask=mask,
            vocab_chunk=9,
        )
    assert got.topk_logp is not None
    d_hidden, d_weight = problem.gradients(got.logp, got.entropy, hidden, weight, topk=got.topk_logp)

    dense = dense_stats(problem.hidden, problem.weight, problem.token_ids, problem.topk_ids, VOCAB, 0.8)
    keep = torch.ones(12) if mask is None else mask
    upstream = (problem.grad_logp * keep, problem.grad_entropy * keep, problem.grad_topk * keep[:, None])
    outputs = (dense.logp, dense.entropy, dense.topk_logp)
    dense_hidden, dense_weight = torch.autograd.grad(outputs, (problem.hidden, problem.weight), upstream)
    rows = keep.bool()
    close = {"rtol": 0.0, "atol": 1e-12}
    torch.testing.assert_close(got.logp[rows], dense.logp[rows], **close)
    torch.testing.assert_close(got.entropy[rows], dense.entropy[rows], **close)
    torch.testing.assert_close(got.topk_logp[rows], dense.topk_logp[rows], **close)
    torch.testing.assert_close(d_weight, dense_weight[start:stop], **close)
    if op == "reference":
        # The reference starts at logits: the sum over shards is the caller's.
        if world > 1:
            dist.all_reduce(d_hidden)
    elif layout == "sequence_sharded":
        dense_hidden = dense_hidden.chunk(world)[rank]
    torch.testing.assert_close(d_hidden, dense_hidden, **close)
    return [x.detach().numpy() for x in (got.logp, got.entropy, got.topk_logp)]


def _all_cases(rank: int, world: int) -> list[tuple[str, list[np.ndarray]]]:
    results = []
    for edges in LAYOUTS[world]:
        for layout in ("replicated", "sequence_sharded"):
            results += [
                (f"{edges} {layout} {masked}", _outputs(rank, edges, layout, "op", masked)) for masked in (False, True)
            ]
        results.append((f"{edges} reference", _outputs(rank, edges, "replicated", "reference", False)))
    if world > 1:
        _count_collectives(world)
        _one_rank_without_rows(rank, world)
    return results


def _count_collectives(world: int) -> None:
    """Forward: one all-gather of 4 (4 + K) bytes a token in float32. Backward: one reduction, and nothing else."""
    calls: list[tuple[str, int]] = []
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather", "broadcast", "reduce")
    originals = {name: getattr(dist, name) for name in names}

    def counted(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent = args[0] if name in ("all_reduce", "broadcast", "reduce") else args[1]
            calls.append((name, sent.numel() * sent.element_size()))
            return originals[name](*args, **kwargs)

        return call

    problem = random_problem(12, 6, 14 * world, VOCAB if world == 4 else 14 * world, 5)
    shard = VocabShard.even(14, 14 * world if world < 4 else VOCAB, dist.group.WORLD)
    weight = problem.weight.detach().float()[shard.start : shard.stop].clone().requires_grad_()
    patches = [patch.object(dist, name, counted(name)) for name in names]
    for layout in ("replicated", "sequence_sharded"):
        hidden = problem.hidden.detach().float()
        hidden = hidden.chunk(world)[dist.get_rank()] if layout == "sequence_sharded" else hidden
        hidden = hidden.clone().requires_grad_()
        calls.clear()
        for p in patches:
            p.start()
        stats = token_stats(
            hidden,
            weight,
            problem.token_ids.clamp(max=shard.vocab_size - 1),
            problem.topk_ids.clamp(max=shard.vocab_size - 1),
            shard=shard,
            hidden_layout=layout,  # type: ignore[arg-type]
        )
        forward = list(calls)
        calls.clear()
        assert stats.topk_logp is not None
        (stats.logp.sum() + stats.topk_logp.exp().sum()).backward()
        for p in patches:
            p.stop()
        statistics = ("all_gather_into_tensor", 12 * 4 * (4 + 5))
        gather = ("all_gather_into_tensor", hidden.numel() * 4)
        if layout == "replicated":
            assert forward == [statistics], forward
            assert calls == [("all_reduce", 12 * 6 * 4)], calls
        else:
            assert forward == [gather, statistics], forward
            assert calls == [gather, ("reduce_scatter_tensor", 12 * 6 * 4)], calls


def _one_rank_without_rows(rank: int, world: int) -> None:
    """All rows masked: collectives still run on every rank, so nobody waits, and gradients are zeros."""
    problem = random_problem(4 * world, 6, 14 * world, 14 * world, 2)
    shard = VocabShard.even(14, 14 * world, dist.group.WORLD)
    weight = problem.weight.detach()[shard.start : shard.stop].clone().requires_grad_()
    hidden = problem.hidden.detach().chunk(world)[rank].clone().requires_grad_()
    stats = token_stats(
        hidden,
        weight,
        problem.token_ids,
        shard=shard,
        hidden_layout="sequence_sharded",
        loss_mask=torch.zeros(4 * world),
    )
    stats.logp.sum().backward()
    assert hidden.grad is not None
    assert (hidden.grad == 0).all()
    assert weight.grad is not None
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_equals_dense_and_ranks_agree_to_the_bit(world: int) -> None:
    per_rank = run_ranks(_all_cases, world, world)
    first = per_rank[0]
    assert len(first) == 5 * len(LAYOUTS[world])
    for other in per_rank[1:]:
        for (name, mine), (_, theirs) in zip(first, other, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.tobytes() == b.tobytes(), name
