"""Buckets of a model that is spread over ranks, put together by hand from what each rank writes."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.checkpoint.weight_layout import ALIGNMENT, unpack
from megatron_dppo.models.names import Block

EXPERTS = 6


def whole(shape: tuple[int, ...]) -> Block:
    return tuple((0, size) for size in shape)


def model() -> tuple[dict[str, torch.Tensor], dict[str, list[Source]]]:
    """A layer on two ranks: rows and columns divided, heads interleaved, experts 0-2 and 3-5, and a norm of rank 1."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (7, 4), "model.layers.0.q_proj.weight": (8, 4)}
    sources = {
        "embed.weight": [Source(0, ((0, 4), (0, 4))), Source(1, ((4, 7), (0, 4)))],
        "model.layers.0.q_proj.weight": [Source(r, ((r * 4, r * 4 + 4), (0, 4))) for r in (1, 0)],
    }
    shapes["model.layers.0.o_proj.weight"] = (4, 6)
    sources["model.layers.0.o_proj.weight"] = [Source(r, ((0, 4), (r * 3, r * 3 + 3))) for r in (0, 1)]
    for expert in range(EXPERTS):
        for matrix, shape in (("gate_proj", (3, 4)), ("up_proj", (3, 4)), ("down_proj", (4, 3))):
            name = f"model.layers.0.mlp.experts.{expert}.{matrix}.weight"
            shapes[name], sources[name] = shape, [Source(expert // 3, whole(shape))]
    shapes["norm.weight"], sources["norm.weight"] = (5,), [Source(1, whole((5,)))]
    tensors = {
        name: torch.randn(shape, generator=generator).to(torch.bfloat16 if "experts" in name else torch.float32)
        for name, shape in shapes.items()
    }
    return tensors, sources


def _cut(tensor: torch.Tensor, block: Block) -> torch.Tensor:
    return tensor[tuple(slice(*span) for span in block)]


def buckets_of(rank: int, bucket_bytes: int, shares: int = 1, sliced: bool = False) -> WeightBuckets:
    tensors, sources = model()
    local = {
        (name, source.block): partial(_cut, tensors[name], source.block)
        for name, given in sources.items()
        for source in given
        if source.rank == rank
    }
    described = [(name, tuple(tensors[name].shape), tensors[name].dtype) for name in by_matrix(tensors)]
    return WeightBuckets(described, sources, local, rank=rank, bucket_bytes=bucket_bytes, shares=shares, sliced=sliced)


@pytest.mark.parametrize("shares", [1, 2, 4])
@pytest.mark.parametrize("bucket_bytes", [40, 128, 300, 10_000])
def test_what_the_ranks_write_is_the_model(bucket_bytes: int, shares: int) -> None:
    tensors, _ = model()
    ranks = [buckets_of(rank, bucket_bytes, shares) for rank in (0, 1)]
    assert ranks[0].layouts == ranks[1].layouts
    assert ranks[0].owners == [0, 1]
    received: dict[str, torch.Tensor] = {}
    for index, layout in enumerate(ranks[0].layouts):
        payload = torch.full((layout.size,), 255, dtype=torch.uint8)
        for rank, buckets in enumerate(ranks):
            own = torch.full((layout.size,), 254, dtype=torch.uint8)
            buckets.write(index, own)
            for part in layout.segments:
                if part.source == rank:
                    payload[part.start : part.stop] = own[part.start : part.stop]
        for slot, tensor in unpack(layout.slots, payload):
            assert slot.offset % ALIGNMENT == 0
            singles = tensor.unbind() if slot.experts else [tensor]
            for name, single in zip(slot.names(), singles, strict=True):
                assert name not in received
                received[name] = single.clone()
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert torch.equal(received[name], tensor), name
    largest = max(t.nbytes for t in tensors.values())
    assert ranks[0].largest <= max(bucket_bytes, largest)
    assert ranks[0].nbytes == sum(layout.size for layout in ranks[0].layouts)


@pytest.mark.parametrize("bucket_bytes", [40, 10_000])
def test_a_slice_of_every_expert_goes_to_the_worker_that_computes_with_it(bucket_bytes: int) -> None:
    tensors, _ = model()
    ranks = [buckets_of(rank, bucket_bytes, 3, sliced=True) for rank in (0, 1)]
    sent = sum(slot.nbytes for layout in ranks[0].layouts for slot in layout.slots)
    assert sent == sum(tensor.nbytes for tensor in tensors.values())
    for worker in range(3):
        for index, layout in enumerate(ranks[0].layouts):
            if layout.share != worker:
                continue
            payload = torch.full((layout.size,), 255, dtype=torch.uint8)
            for buckets in ranks:
                buckets.write(index, payload)
            for slot, stack in unpack(layout.slots, payload):
                own = slice(worker, worker + 1)
                where = (slice(None), own) if "down" in slot.name else (own, slice(None))
                for name, single in zip(slot.names(), stack, strict=True):
                    assert torch.equal(single[where], tensors[name][where]), name
    assert buckets_of(0, bucket_bytes, 2, sliced=True).shares == [], "three rows cannot be halved"


def test_experts_of_a_layer_lie_by_matrix_and_come_from_each_rank_at_once() -> None:
    (layout,) = buckets_of(0, 10_000).layouts
    stacks = [slot for slot in layout.slots if slot.experts]
    assert [(slot.name.rsplit(".", 2)[-2], slot.experts) for slot in stacks] == [
        ("gate_proj", (0, 6)),
        ("up_proj", (0, 6)),
        ("down_proj", (0, 6)),
    ]
    for before, after in pairwise(layout.segments):
        assert before.stop <= after.start
        assert before.source != after.source
    # Rank 0's experts 0-2 of each matrix are one run of bytes.
    gate = stacks[0]
    assert any(s.start == gate.offset and s.stop == gate.offset + gate.nbytes // 2 for s in layout.segments)


def test_the_order_is_the_models_but_for_the_matrices_of_experts() -> None:
    names = [
        "embed",
        *(f"l.{e}.experts.{n}.{m}" for e in (0, 1) for n in (0, 1, 10, 2) for m in ("up", "down")),
        "norm",
    ]
    assert by_matrix(names) == [
        "embed",
        *(f"l.{e}.experts.{n}.{m}" for e in (0, 1) for m in ("up", "down") for n in (0, 1, 2, 10)),
        "norm",
    ]
    swapped = [("l.0.experts.1.up", (2, 2), torch.float32), ("l.0.experts.0.up", (2, 2), torch.float32)]
    with pytest.raises(RuntimeError, match=r"experts of l.0.experts.\{expert\}.up do not come in order: \[1, 0\]"):
        WeightBuckets(
            swapped, {name: [Source(0, whole(shape))] for name, shape, _ in swapped}, {}, rank=0, bucket_bytes=64
        )


def test_experts_that_are_divided_come_one_by_one() -> None:
    tensors, sources = model()
    for name in [n for n in sources if "experts" in n and "down" not in n]:
        rows, cols = tensors[name].shape
        sources[name] = [Source(0, ((0, 1), (0, cols))), Source(1, ((1, rows), (0, cols)))]
    described = [(name, tuple(tensors[name].shape), tensors[name].dtype) for name in by_matrix(tensors)]
    layouts = WeightBuckets(described, sources, {}, rank=7, bucket_bytes=10_000).layouts
    slots = [slot for layout in layouts for slot in layout.slots]
    assert sum("gate_proj" in slot.name for slot in slots) == EXPERTS
    assert not any(slot.blocks for slot in slots if "gate_proj" in slot.name)  # rows in order lie whole
    assert sorted(name for slot in slots for name in slot.names()) == sorted(tensors)


def test_a_block_is_that_of_the_parameter_wherever_its_memory_is() -> None:
    from megatron_dppo.checkpoint.hf_export import _Local
    from megatron_dppo.models.live import Owned
    from megatron_dppo.models.names import Piece

    parameter = torch.nn.Parameter(torch.arange(24.0).view(6, 4), requires_grad=False)
    piece = Piece("up", ((0, 2), (0, 4)), ((2, 4), (0, 4)))
    block = _Local(Owned("fc1", parameter, (piece,), (6, 4)), piece)
    for _ in range(2):
        assert block().tolist() == list(range(8, 16))
    parameter[2:4] = 7  # trained
    assert block().tolist() == [7] * 8
    storage, kept = parameter.untyped_storage(), parameter.clone()
    storage.resize_(0)  # lent to an engine, and back
    storage.resize_(96)
    parameter.copy_(kept + 1)
    assert block().tolist() == [8] * 8
    parameter.data = torch.full((6, 4), 5.0)  # in another buffer
    assert block().tolist() == [5] * 8


@pytest.mark.parametrize("shares", [2, 4])
@pytest.mark.parametrize("bucket_bytes", [40, 300, 10_000])
def test_experts_that_workers_divide_go_to_their_own_alone(shares: int, bucket_bytes: int) -> None:
    """Six experts for four workers: 2, 2, 1, 1, as vLLM divides them."""
    own = {2: [[0, 1, 2], [3, 4, 5]], 4: [[0, 1], [2, 3], [4], [5]]}[shares]
    buckets = buckets_of(0, bucket_bytes, shares)
    tensors, _ = model()
    assert buckets.shares == list(range(shares))
    assert [buckets.owners_of(share) for share in buckets.shares] == {
        2: [[0], [1]],
        4: [[0], [0, 1], [1], [1]],
    }[shares]
    came = []
    for worker in range(shares):
        mine = [layout for layout in buckets.layouts if layout.goes_to(worker)]
        names = [name for layout in mine for slot in layout.slots for name in slot.names()]
        assert len(set(names)) == len(names)
        dense = {name for name in tensors if "experts" not in name}
        assert set(names) == dense | {name for name in tensors if any(f"experts.{e}." in name for e in own[worker])}
        came.append(sum(layout.size for layout in mine))
    assert buckets.worker_nbytes == max(came) < buckets.nbytes
