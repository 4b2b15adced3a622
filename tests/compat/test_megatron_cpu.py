"""What makes real Megatron-Core run on a CPU, and that it stays out of everybody else's way."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_dppo.compat import megatron_cpu
from tests.distributed import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the shims do nothing where there is a GPU")


def in_torchscript(x: torch.Tensor) -> torch.Tensor:
    made = torch.zeros(2) + torch.ones(2) + torch.full([2], 2.0) + torch.tensor([1.0, 1.0]) + torch.arange(2, 4)[0]
    return made + torch.empty(2).copy_(torch.empty_like(x).copy_(x))


def in_one_process(rank: int) -> None:
    megatron_cpu.install()
    patched = torch.cuda.get_rng_state
    megatron_cpu.install()
    assert torch.cuda.get_rng_state is patched

    # Literals of others keep their meaning.
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with torch.device("meta"):
        assert torch.zeros(1).is_meta
    assert torch._C._len_torch_function_stack() == 0  # a mode would be asked at every operation
    assert torch.equal(torch.jit.script(in_torchscript)(torch.ones(2)), torch.tensor([7.0, 7.0]))
    for function in (torch.arange, torch.empty, torch.empty_like, torch.full, torch.ones, torch.tensor, torch.zeros):
        assert pickle.loads(pickle.dumps(function)) is function

    # Megatron-Core's own mean the CPU: a tensor made (in any thread), one moved, and the type of a gradient.
    from megatron.core.models.common.embeddings.rope_utils import get_pos_emb_on_this_cp_rank
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
    from megatron.core.transformer.utils import get_default_causal_mask

    mask = ThreadPoolExecutor(1).submit(get_default_causal_mask, 3).result()
    assert torch.equal(mask, torch.ones(3, 3).triu(1).bool())
    positions = get_pos_emb_on_this_cp_rank(torch.arange(4.0)[:, None], 0, dist.new_group([0]))
    assert torch.equal(positions, torch.arange(4.0)[:, None])
    weight = torch.nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([6.0, 8.0])
    clip_grad_by_total_norm_fp32([weight], 5.0, 10.0)
    assert torch.allclose(weight.grad, torch.tensor([3.0, 4.0]))

    from megatron.core.tensor_parallel.random import (
        checkpoint,
        get_cuda_rng_tracker,
        model_parallel_cuda_manual_seed,
    )

    from megatron_dppo.models.groups import initialize_groups
    from megatron_dppo.models.parallel import ParallelConfig

    initialize_groups(ParallelConfig(), seed=5)
    outside = torch.get_rng_state()
    with get_cuda_rng_tracker().fork():
        first = torch.rand(4)
    assert torch.equal(torch.get_rng_state(), outside)  # a region's draws leave the default stream alone
    with get_cuda_rng_tracker().fork():
        assert not torch.equal(torch.rand(4), first)
    model_parallel_cuda_manual_seed(5)
    with get_cuda_rng_tracker().fork():
        assert torch.equal(torch.rand(4), first)

    # Recomputation draws the same dropout mask again: the gradient is that of the forward that ran.
    x = torch.ones(1000, requires_grad=True)
    out = checkpoint(lambda t: torch.nn.functional.dropout(t, 0.5), False, x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_random_state_and_literals() -> None:
    run_ranks(in_one_process, 1)


def uneven_collectives(rank: int) -> None:
    megatron_cpu.install()
    from megatron.core.tensor_parallel.mappings import (
        gather_from_sequence_parallel_region,
        reduce_scatter_to_sequence_parallel_region,
    )

    group, heights = dist.group.WORLD, [3, 0, 5]
    shard = torch.full((heights[rank], 2), float(rank), requires_grad=True)
    whole = gather_from_sequence_parallel_region(shard, group=group, output_split_sizes=heights)
    assert whole[:, 0].tolist() == [0.0] * 3 + [2.0] * 5
    (whole * (rank + 1)).sum().backward()  # every rank's use of the shard adds up: 1 + 2 + 3
    assert torch.equal(shard.grad, torch.full_like(shard, 6.0))

    rows = torch.arange(8.0)[:, None].requires_grad_()
    mine = reduce_scatter_to_sequence_parallel_region(rows, group=group, input_split_sizes=heights)
    start = sum(heights[:rank])
    assert torch.equal(mine[:, 0], 3 * torch.arange(8.0)[start : start + heights[rank]])
    mine.sum().backward()
    assert torch.equal(rows.grad, torch.ones_like(rows))


def test_collectives_of_shards_of_unequal_height() -> None:
    run_ranks(uneven_collectives, 3)


def threads_of_groups(rank: int) -> list[int]:
    megatron_cpu.install()
    counts = []
    for _ in range(3):
        group = dist.new_group(timeout=timedelta(seconds=77))
        assert group._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=77)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total == 2
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def test_groups_share_the_thread_that_looks_for_work() -> None:
    for first, second, third in run_ranks(threads_of_groups, 2):
        assert second - first == third - second == 2  # those that work
