from __future__ import annotations

import json
import struct
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_dppo.checkpoint.weight_layout import pack, unpack
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.fleet.object_store import ObjectStoreSender
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync, Manifest, read_shapes
from megatron_dppo.rollout.weight_transfer.recipients import Recipients
from megatron_dppo.rollout.weight_transfer.segment import MemorySegment
from tests.distributed import run_ranks

shapes = st.lists(st.sampled_from([(), (1,), (3, 5), (0, 4), (17,), (8, 8, 2)]), min_size=1, max_size=12)


@settings(max_examples=80)
@given(shapes=shapes, bucket=st.sampled_from([1, 64, 100, 1000, 10**6]), seed=st.integers(0, 99))
def test_what_is_packed_comes_out_again(shapes: list[tuple[int, ...]], bucket: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    kinds = [torch.float32, torch.bfloat16, torch.float16, torch.int64]
    tensors = [(f"t{i}", torch.randn(shape, generator=generator).to(kinds[i % 4])) for i, shape in enumerate(shapes)]
    buckets = list(pack(tensors, bucket))
    largest = max(t.nbytes for _, t in tensors)
    assert all(len(b.payload) <= max(bucket, largest) for b in buckets)
    received = [
        (slot.name, tensor.clone()) for b in buckets for slot, tensor in unpack(b.slots, torch.from_numpy(b.payload))
    ]
    assert [name for name, _ in received] == [name for name, _ in tensors]
    for (_, got), (_, sent) in zip(received, tensors, strict=True):
        assert got.dtype == sent.dtype
        assert torch.equal(got, sent)


def test_a_source_may_reuse_its_memory_and_yield_views() -> None:
    def source():
        buffer = torch.empty(4)
        for i in range(5):
            buffer.fill_(i)
            yield f"t{i}", buffer
        yield "transposed", torch.arange(6.0).view(2, 3).t()

    received = {s.name: t.clone() for b in pack(source(), 40) for s, t in unpack(b.slots, torch.from_numpy(b.payload))}
    assert [received[f"t{i}"][0].item() for i in range(5)] == [0, 1, 2, 3, 4]
    assert torch.equal(received["transposed"], torch.arange(6.0).view(2, 3).t())


def test_packing_takes_one_bucket_of_memory_at_a_time() -> None:
    drawn = []

    def source():
        for i in range(8):
            drawn.append(i)
            yield f"t{i}", torch.zeros(256)

    buckets = pack(source(), 2048)
    next(buckets)
    assert len(drawn) == 3  # two fill the bucket, the third shows that it is full


def test_another_process_reads_a_segment_by_its_path() -> None:
    with closing(MemorySegment()) as segment:
        segment.write(np.zeros(1000, dtype=np.uint8))
        payload = np.arange(200, dtype=np.uint8)
        segment.write(payload)
        read = f"import sys; sys.stdout.buffer.write(open({segment.path!r}, 'rb').read())"
        assert subprocess.run([sys.executable, "-c", read], capture_output=True, check=True).stdout == payload.tobytes()
        path = segment.path
    assert not Path(path).exists()


def test_a_sync_must_bring_every_tensor_once_in_its_shape() -> None:
    manifest = Manifest({"a": (2,), "b": (3, 4), "lm_head.weight": (5,)}, tied_embeddings=True)
    manifest.begin()
    manifest.check("a", (2,))
    with pytest.raises(IncompleteSync, match="a came twice"):
        manifest.check("a", (2,))
    with pytest.raises(IncompleteSync, match=r"b has shape \(4, 3\), the engine's model has \(3, 4\)"):
        manifest.check("b", (4, 3))
    with pytest.raises(IncompleteSync, match="c is not a tensor"):
        manifest.check("c", (1,))
    manifest.begin()
    manifest.check("a", (2,))
    with pytest.raises(IncompleteSync, match="1 tensors did not come, first b"):
        manifest.end()
    manifest.begin()
    for name, shape in (("b", (3, 4)), ("a", (2,))):  # the tied head may come or not
        manifest.check(name, shape)
    manifest.end()


def test_without_a_checkpoint_the_first_sync_says_what_belongs() -> None:
    manifest = Manifest(None)
    manifest.begin()
    manifest.check("a", (2,))
    manifest.end()
    manifest.begin()
    with pytest.raises(IncompleteSync, match="b is not a tensor"):
        manifest.check("b", (2,))


def test_shapes_come_from_the_headers_alone(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(4, dtype=torch.bfloat16)}, tmp_path / "two.safetensors", metadata={"format": "pt"})
    assert read_shapes(tmp_path) == {"a": (2, 3), "b": (4,)}


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01", struct.pack("<Q", 10**9) + b"{}", struct.pack("<Q", 5) + b"[[[[[", json.dumps({}).encode()],
)
def test_a_corrupt_checkpoint_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors is no intact safetensors file"):
        read_shapes(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no .safetensors file"):
        read_shapes(tmp_path)


def send_to_a_full_store(rank: int) -> tuple[list[int], dict[str, str]]:
    """Buckets that were gathered all the same, and what the engines are blamed for."""
    gathered: list[int] = []
    buckets: Any = SimpleNamespace(
        layouts=[SimpleNamespace(slots=(), size=8)] * 3,
        largest=8,
        gather=lambda index, payload: gathered.append(index),
    )

    def put(value: object) -> None:
        raise ray.exceptions.ObjectStoreFullError("no room")

    ray.put = put
    engines: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    to = Recipients(engines, timeout_s=1)
    ObjectStoreSender(buckets, torch.device("cpu")).send(1, to)
    return gathered, {name: type(error).__name__ for name, error in to.errors.items()}


def test_a_full_object_store_leaves_no_rank_waiting_and_fails_every_engine() -> None:
    ((gathered, failed),) = run_ranks(send_to_a_full_store, 1)
    assert gathered == [0, 1, 2]
    assert failed == {"a": "ObjectStoreFullError", "b": "ObjectStoreFullError"}
