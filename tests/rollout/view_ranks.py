"""What the workers of an engine do in a test of weights that are loaded by views: vLLM's model and our receiver, with
buckets as several trainer ranks write them, and no engine around them."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from safetensors.torch import load_file

from megatron_dppo.checkpoint.weight_buckets import Source, WeightBuckets, by_matrix
from megatron_dppo.rollout.weight_transfer.turns import Emptying, Filling

BUCKET_BYTES = 20_000
"""Less than the experts of a layer."""


def divided(name: str, tensor: torch.Tensor) -> int | None:
    """The dimension in which two trainer ranks divide a tensor, as tensor parallelism has it; None where they do
    not."""
    if "experts" in name or tensor.ndim < 2:
        return None
    return 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0


def buckets_of(folder: Path, bucket_bytes: int, shares: int, sliced: bool) -> Iterator[tuple[Any, torch.Tensor]]:
    """(layout, payload) of each bucket of a checkpoint that two trainer ranks hold."""
    tensors = {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}
    sources: dict[str, list[Source]] = {}
    for name, tensor in tensors.items():
        spans = tuple((0, size) for size in tensor.shape)
        if "experts" in name and (tensor.ndim > 2 or name.endswith("_bias")):  # a layer's in one tensor: one by one
            sources[name] = [Source(e % 2, ((e, e + 1), *spans[1:])) for e in range(len(tensor))]
            continue
        dim = divided(name, tensor)
        if dim is None:
            sources[name] = [Source(0, spans)]
            continue
        half = tensor.shape[dim] // 2
        sources[name] = [
            Source(rank, (*spans[:dim], span, *spans[dim + 1 :]))
            for rank, span in enumerate([(0, half), (half, tensor.shape[dim])])
        ]
    described = [(name, tuple(tensors[name].shape), tensors[name].dtype) for name in by_matrix(tensors)]

    def part(name: str, block: Any) -> Callable[[], torch.Tensor]:
        return lambda: tensors[name][tuple(slice(*span) for span in block)]

    local = {(name, source.block): part(name, source.block) for name, given in sources.items() for source in given}
    ranks = [
        WeightBuckets(described, sources, local, rank=rank, bucket_bytes=bucket_bytes, shares=shares, sliced=sliced)
        for rank in (0, 1)
    ]
    for index, layout in enumerate(ranks[0].layouts):
        payload = torch.zeros(layout.size, dtype=torch.uint8)
        for rank in ranks:
            rank.write(index, payload)
        yield layout, payload


@dataclass
class Worker:
    """vLLM's model on one device of an engine, and what receives its weights."""

    model: Any
    receiver: Any
    shares: int
    """Workers that get what they need of the experts alone."""
    sliced: bool
    """Whether that is a slice of each."""
    taken: float = 0.0
    """Fraction of the last sync's buckets that came here."""
    held: set[str] = field(default_factory=set)
    """Layers whose weights vLLM still held as they came when all had come."""

    def sync(self, folder: Path, *, agree: bool = False) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

        from megatron_dppo.rollout.engine import TransferTerms
        from megatron_dppo.rollout.vllm.receiver import TransferInit

        buckets = list(buckets_of(folder, BUCKET_BYTES, self.shares, self.sliced))
        receiver = self.receiver
        receiver.start_weight_update()
        if agree:
            terms = TransferTerms(layouts=[layout for layout, _ in buckets])
            receiver.init_transfer_engine(TransferInit(terms=pickle.dumps(terms)))
        receiver._incoming = 1
        mine = receiver._buckets._layouts
        self.taken = len(mine) / len(buckets)
        for index, layout in mine.items():
            receiver._load(layout.slots, buckets[index][1])
            buckets[index][1].fill_(77)  # the sender uses it again
        self.held = {name for name, m in self.model.named_modules() if get_layerwise_info(m).loaded_weights}
        receiver.finish_weight_update()
        assert receiver.incomplete == []

    def reloaded(self) -> set[str]:
        """Layers with weights that are left to vLLM's loaders."""
        left = set(self.receiver._views.layers.modules())
        return {name for name, m in self.model.named_modules() if m in left and list(m.parameters(recurse=False))}

    def numbers(self) -> dict[str, torch.Tensor]:
        return {name: p.data.clone() for name, p in self.model.named_parameters()}


@contextmanager
def on_a_gpu(process: Callable[..., None] = lambda method, layer: None) -> Iterator[None]:
    """vLLM leaves weights as they are loaded, as on a GPU; on a CPU it packs copies of them. `process` is what it does
    with experts after a load."""
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    with (
        patch.object(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: None),
        patch.object(UnquantizedFusedMoEMethod, "process_weights_after_loading", process),
    ):
        yield


@contextmanager
def padded() -> Iterator[None]:
    """vLLM fills experts up to blocks of 128 and keeps them in another form than the checkpoint's, as those that it
    quantises."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PerBlockOnlineMoEMethod

    def process(method: Any, layer: Any) -> None:
        Fp8PerBlockOnlineMoEMethod._zero_padding(method, layer)
        layer.w13_weight.data.neg_()

    def rounded(method: Any, hidden_size: int, intermediate_size_per_partition: int, *_: Any, **__: Any) -> Any:
        return tuple(-(-side // 128) * 128 for side in (hidden_size, intermediate_size_per_partition))

    with on_a_gpu(process), patch.object(UnquantizedFusedMoEMethod, "maybe_roundup_sizes", rounded):
        yield


def swap_gate_and_up(method: Any, layer: Any) -> None:
    """As vLLM does for one of its kernels; of one layer only."""
    if ".1." in layer.layer_name:
        gate, up = layer.w13_weight.data.chunk(2, dim=1)
        layer.w13_weight.data.copy_(torch.cat([up, gate], dim=1))


def worker(folder: Path, workers: int, expert_parallel: bool) -> Worker:
    """Load a model. The ranks of the test are the workers of the engine."""
    os.environ |= {"VLLM_MLA_DISABLE": "1", "TORCHDYNAMO_DISABLE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ["VLLM_DIST_IDENT"] = f"views-{os.environ['MASTER_PORT']}"
    from vllm import AsyncEngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader import get_model_loader

    from megatron_dppo.compat.vllm_plugin import register
    from megatron_dppo.rollout.vllm.receiver import BucketReceiver

    register()
    arguments = AsyncEngineArgs(
        model=str(folder),
        dtype=json.loads((folder / "config.json").read_text())["dtype"],
        enforce_eager=True,
        block_size=32,
        max_model_len=64,
        max_num_batched_tokens=64,
        enable_chunked_prefill=False,
        skip_tokenizer_init=True,
        tensor_parallel_size=workers,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp" if workers > 1 else None,
        weight_transfer_config={"backend": "megatron_dppo"},
    )
    config = arguments.create_engine_config()
    rank = config.parallel_config.rank = torch.distributed.get_rank()
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(workers, rank, "env://", rank, "gloo")
            parallel_state.ensure_model_parallel_initialized(workers, 1)
        model = get_model_loader(config.load_config).load_model(config, config.model_config)
        receiver = BucketReceiver(config.weight_transfer_config, config, torch.device("cpu"), model)
    return Worker(model, receiver, workers, not expert_parallel)


@dataclass(frozen=True)
class Outcome:
    """Of one model."""

    reloaded: set[str]
    """Layers with weights that vLLM reloads."""
    wrong: list[str]
    """Parameters that after a sync are not those of a fresh load, to the bit."""
    taken: float = 1.0
    held: frozenset[str] = frozenset()
    """See `Worker`."""


def synced(
    rank: int,
    folders: list[tuple[Path, Path, Path]],
    workers: int,
    expert_parallel: bool,
    way: Literal["", "swapped", "padded"] = "",
) -> list[Outcome]:
    """Three syncs to each model. `folders`: weights to start from, of the second sync, and of the first and third."""
    found = []
    with padded() if way == "padded" else on_a_gpu(swap_gate_and_up) if way else on_a_gpu():
        for start, second, third in folders:
            held = worker(start, workers, expert_parallel)
            fresh = {folder: worker(folder, workers, expert_parallel).numbers() for folder in (third, second)}
            wrong = []
            for number, folder in enumerate((third, second, third)):
                held.sync(folder, agree=number == 0)
                now, numbers = held.numbers(), fresh[folder]
                assert now.keys() == numbers.keys()
                wrong += [name for name in now if not torch.equal(now[name], numbers[name])]
            found.append(Outcome(held.reloaded(), wrong, held.taken, frozenset(held.held)))
    return found


def in_turn(rank: int, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Several of these in one process: to import vLLM takes longer than any of them."""
    return [call(rank, *arguments) for call, arguments in calls]


def lets_go(receiver: Any) -> bool:
    """Whether a worker that has opened a rank's buffers, and is then told that the sync died, is there no more."""
    from megatron_dppo.rollout.vllm.receiver import BucketUpdate

    turns = Filling(2, timeout_s=5.0)
    receiver._buckets._buffers, receiver._buckets._turns = [torch.zeros(1)], Emptying(turns.path, 5.0)
    assert turns.attended
    receiver.receive_weights(BucketUpdate(version=1, abandon=True))
    return not turns.attended and not receiver._buckets._buffers


def packed(rank: int, start: Path, folder: Path) -> Outcome:
    """A worker on a CPU, where layers compute with packed copies: what its linear layers answer after two syncs."""
    held, fresh = worker(start, 1, False), worker(folder, 1, False)
    assert lets_go(held.receiver), "the rank that fills the buffers waits for a worker that was told of no sync"
    held.sync(start, agree=True)
    held.sync(folder)
    wrong = []
    for (name, layer), other in zip(held.model.named_modules(), fresh.model.modules(), strict=True):
        if hasattr(layer, "cpu_linear"):
            width = getattr(layer, "input_size", None) or layer.embedding_dim
            x = torch.linspace(-1, 1, 3 * width).view(3, width)
            if not torch.equal(layer.cpu_linear(x, layer.weight, None), other.cpu_linear(x, other.weight, None)):
                wrong.append(name)
    return Outcome(held.reloaded(), wrong)
