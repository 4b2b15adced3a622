"""A profile of a real step: phases and kinds of work account for its time, and the trace opens."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile, record_function

from megatron_dppo.actor import fused_adam
from megatron_dppo.actor.profiling import PHASE, _ancestry, kind_of
from megatron_dppo.models.flops import peak_flops, training_flops
from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config
from tests.actor.matrix import SHAPE, TEMPERATURE, Case, advantages, build_actor
from tests.distributed import run_ranks
from tests.models.public_configs import CONFIGS
from tests.tiny import tiny_qwen3_moe

PHASES = ["microbatches", "forward and backward", "metrics", "optimizer"]


def profile_step(rank: int, path: str, batch: Any, trace: Path) -> dict[str, Any]:
    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.actor.profiling import profiled
    from megatron_dppo.batch import InMemorySource

    actor = build_actor(path, {}, Case())
    source = InMemorySource.of(batch)
    signal = TrainingSignal(advantages(), advantages(), [np.arange(6), np.arange(6, 12)])
    actor.update(source, signal)
    with profiled(actor.phases, trace=trace) as profile:
        actor.update(source, signal)
    with actor.phases("after"):
        pass
    console = Console(width=120, file=io.StringIO())
    for table in profile.tables(flops=1e9, peak_flops=None):
        console.print(table)
    return {
        "seconds": profile.seconds,
        "phases": {name: (use.seconds, use.peak_bytes) for name, use in profile.phases.items()},
        "work": profile.work,
        "busy": profile.busy,
        "text": console.file.getvalue(),
    }


def test_a_step_is_accounted_for(tmp_path: Path) -> None:
    from tests.actor.reference import make_rollout

    model = tiny_qwen3_moe(tmp_path / "model", seed=3)
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    trace = tmp_path / "profile" / "step.json.gz"
    (found,) = run_ranks(profile_step, 1, str(tmp_path / "model"), batch, trace)
    assert list(found["phases"]) == PHASES, "a phase outside of the profile must not be counted"
    inside = sum(seconds for seconds, _ in found["phases"].values())
    assert 0.7 * found["seconds"] < inside <= found["seconds"]
    assert all(seconds > 0 and peak > 0 for seconds, peak in found["phases"].values())
    assert found["phases"]["forward and backward"][0] > found["phases"]["metrics"][0]
    assert sum(found["work"].values()) == pytest.approx(found["busy"])
    assert 0.5 * found["seconds"] < found["busy"] <= 1.01 * found["seconds"]
    assert {"LM head", "attention core", "router", "optimizer", "adding gradients up"} <= found["work"].keys()
    printed = " ".join(found["text"].split())
    assert all(name in printed for name in [*PHASES, "MFU unknown on this device", "nothing running"])

    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    named = {event.get("name") for event in events}
    assert {PHASE + name for name in PHASES} <= named
    assert "_TokenStats" in named


@pytest.mark.parametrize(
    ("kernel", "chain", "kind"),
    [
        ("nvjet_tst_128x256", "_GroupedLinear", "experts: grouped GEMM"),
        ("nvjet_tst_128x256", "_GroupedLinearBackward autograd::engine", "experts: grouped GEMM"),
        ("nvjet_tst_128x256", "_LayerNormLinear CheckpointFunctionBackward", "linear layers and norms"),
        ("nvjet_tst_128x256", "_TokenStats", "LM head"),
        ("ncclDevKernel_SendRecv", "nccl:all_to_all _AllToAll", "expert all-to-all"),
        ("ncclDevKernel_SendRecv", "nccl:coalesced AttnFuncWithCPAndKVP2P", "context-parallel exchange"),
        ("ncclDevKernel_SendRecv", "nccl:coalesced " + PHASE + "forward and backward", "pipeline messages"),
        ("ncclDevKernel_AllGather_RING_LL", "nccl:_all_gather_base _LayerNormLinear", "tensor-parallel collectives"),
        ("ncclDevKernel_AllGather_RING_LL", "nccl:_all_gather_base " + PHASE + "optimizer", "optimizer: collectives"),
        (
            "ncclDevKernel_ReduceScatter_Sum_f32",
            "nccl:_reduce_scatter_base " + PHASE + "forward and backward",
            "gradient reduction and other collectives",
        ),
        ("elementwise_kernel", "aten::add_ torch::autograd::AccumulateGrad", "adding gradients up"),
        ("cudnn_generated_fort_native_sdpa_sm90", "FusedAttnFunc", "attention core"),
        ("flash_bwd_dq_dk_dv_loop_kernel", "aten::_flash_attention_backward FlashWithSinksBackward", "attention core"),
        ("elementwise_kernel", "aten::mul_ FlashWithSinks", "attention core"),
        ("elementwise_kernel", "aten::mul", "other"),
    ],
)
def test_kinds_of_work(kernel: str, chain: str, kind: str) -> None:
    assert kind_of(kernel, chain) == kind


def test_flops_of_a_step(tmp_path: Path) -> None:
    """Against a count written out for the tiny model, and the published size of the active part of Qwen3-30B-A3B."""
    tiny_qwen3_moe(tmp_path, seed=0)
    tiny = load_hf_config(tmp_path)
    per_layer = 64 * 128 + 2 * 64 * 64 + 128 * 64 + 64 * 8 + 2 * 3 * 64 * 32  # q, k and v, o, router, two experts
    assert tiny.active_parameters == 4 * per_layer + 300 * 64
    attention = 4 * 3 * (2 * 2 * (5**2 + 3**2) * 4 * 32 / 2)  # layers, forward and twice backward, two causal products
    assert training_flops(tiny, np.array([5, 3])) == 6 * 8 * (4 * per_layer + 300 * 64) + attention

    large = resolve_hf_config(CONFIGS["Qwen3-30B-A3B"])
    embedding = large.vocab_size * large.hidden_size
    assert (large.active_parameters + embedding) / 1e9 == pytest.approx(3.3, abs=0.06)


def test_peak_of_a_gpu() -> None:
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989.4e12
    assert peak_flops("NVIDIA H100 PCIe") is None


def test_a_kernel_of_ours_that_no_operator_launches_stands_in_its_phase() -> None:
    """Kineto links kernels to operators, not to annotations: the name around the launch has to be an operator's."""
    with (
        profile(activities=[ProfilerActivity.CPU]) as profiler,
        record_function(PHASE + "optimizer"),
        fused_adam._recorded("FusedAdam: step"),
    ):
        torch.ones(1)
    event = next(e for e in profiler.events() if e.name == "FusedAdam: step")
    assert not event.is_user_annotation
    assert kind_of("adamw", " ".join(_ancestry(event))) == "optimizer"
