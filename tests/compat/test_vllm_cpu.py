"""What the CPU's mixture-of-experts kernels are given under expert parallelism."""

from __future__ import annotations

import pytest
import torch

from megatron_dppo.compat.vllm_cpu import own_experts


@pytest.mark.parametrize(("experts", "workers", "topk"), [(8, 2, 2), (8, 2, 4), (6, 3, 2), (7, 2, 3), (4, 1, 4)])
def test_the_workers_shares_add_up_to_the_layer(experts: int, workers: int, topk: int) -> None:
    """`[tokens, experts]` of weights: what a worker computes, at the experts that are its own."""
    generator = torch.Generator().manual_seed(0)
    weights, ids = torch.rand(200, experts, generator=generator).topk(topk, dim=1)
    whole = torch.zeros(200, experts).scatter_add_(1, ids, weights)
    owner = torch.arange(experts) * workers // experts
    total = torch.zeros_like(whole)
    for worker in range(workers):
        mine = (owner == worker).nonzero().flatten()
        expert_map = torch.full((experts,), -1, dtype=torch.int32)
        expert_map[mine] = torch.arange(len(mine), dtype=torch.int32)
        share, places = own_experts(weights, ids.int(), expert_map)
        assert places.dtype == torch.int32
        assert places.min() >= 0
        assert places.max() < len(mine)
        assert all(len(row.unique()) == topk for row in places)  # a kernel counts an expert once a token
        total[:, mine] += torch.zeros(200, len(mine)).scatter_add_(1, places.long(), share)
    assert torch.equal(total, whole)
