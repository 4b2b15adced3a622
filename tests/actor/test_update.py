"""Gradient steps of the actor against transformers and autograd (tests/actor/reference.py)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

SHAPE = {"groups": 4, "samples": 3, "topk": 5, "moe_layers": 4, "experts": 8, "k": 2}
LR, CLIP, NORMALISER, BUDGET = 2e-3, 1.0, 12.0, 64
TEMPERATURE = 0.25  # peaked laws, so that divergences are large enough to be masked
EPSILON = 1e-3  # large, so that Adam does not blow the rounding of a vanishing gradient up to a full step
MINI_BATCHES = [np.arange(0, 6), np.arange(6, 12)]
LAYOUTS = {
    "1 rank": (1, {}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "DP2 EP2": (2, {"expert": 2}),
}


def advantages() -> np.ndarray:
    return np.random.default_rng(1).choice([-1.0, -0.5, 0.0, 0.7, 1.0], size=SHAPE["groups"] * SHAPE["samples"])


def train_on_rank(rank: int, path: str, layout: dict, preset: str, replay: bool, batch) -> tuple[dict, dict]:
    """What a rank does; returns (metrics, exported weights on rank 0)."""
    from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
    from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
    from megatron_dppo.actor.runtime import start
    from megatron_dppo.algorithm import presets
    from megatron_dppo.batch import InMemorySource
    from megatron_dppo.checkpoint.hf_import import load_hf_weights
    from megatron_dppo.models.build import build_model
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.models.megatron_config import transformer_config
    from megatron_dppo.models.parallel import ParallelConfig

    parallel = ParallelConfig(**layout)
    runtime = start(parallel, seed=0, timeout_minutes=5)
    model = load_hf_config(path)
    chunks = build_model(model, transformer_config(model, parallel, params_dtype=torch.float32), runtime.groups)
    load_hf_weights(chunks, model, runtime.groups, path)
    overrides = {"topk": SHAPE["topk"]} if "topk" in preset else {}
    actor = MegatronActor(
        runtime,
        chunks,
        parallel=parallel,
        config=ActorConfig(dtype="float32", max_tokens_per_microbatch=BUDGET, router_replay="r3" if replay else "none"),
        optimizer=OptimizerConfig(lr=LR, clip_grad=CLIP, epsilon=EPSILON),
        preset=presets.get(preset, **overrides),
        hf_config=model,
        temperature=TEMPERATURE,
        normaliser=NORMALISER,
    )
    signal = TrainingSignal(advantages(), advantages(), MINI_BATCHES)
    source = InMemorySource.of(batch)
    parity = actor.parity(source, replay=True)
    metrics = actor.update(source, signal) | {f"parity/{k}": v for k, v in parity.items()}
    return metrics, {name: tensor.numpy() for name, tensor in actor.export_weights() if tensor is not None}


@pytest.mark.parametrize(
    ("layout", "preset", "replay"),
    [
        ("1 rank", "dppo-binary-tv", True),
        ("TP2 EP2", "dppo-binary-tv", True),
        ("DP2 EP2", "dppo-topk-kl", True),
        ("TP2 EP2", "grpo-clip-higher", False),
        ("TP2 EP2", "minirl", True),
    ],
)
def test_two_steps_equal_transformers(tmp_path, layout, preset, replay):
    from tests.actor.reference import Reference, make_rollout

    model = tiny_qwen3_moe(tmp_path, seed=3)
    model.model.embed_tokens.padding_idx = None  # transformers would not train the row of the padding token
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(train_on_rank, ranks, str(tmp_path), sizes, preset, replay, batch)

    reference = Reference(model.float(), batch, advantages(), preset, NORMALISER, TEMPERATURE, replay)
    history = reference.train(MINI_BATCHES, lr=LR, clip=CLIP, epsilon=EPSILON)
    metrics, weights = results[0]
    assert all(other == metrics for other, _ in results[1:]), "every rank reports the same metrics"
    assert metrics["optimizer/loss"] == pytest.approx(np.mean([loss for loss, _ in history]), rel=2e-5, abs=1e-6)
    assert metrics["optimizer/grad_norm"] == pytest.approx(np.mean([norm for _, norm in history]), rel=1e-5)
    assert metrics["policy/masked_fraction"] > 0.02, "the case is too easy: nothing was masked"
    state = {name: p.detach() for name, p in model.named_parameters()}
    compared = 0
    for name, tensor in weights.items():
        expected = _from_fused(state, name)
        np.testing.assert_allclose(tensor, expected, atol=2e-6, rtol=0, err_msg=name)
        compared += 1
    assert compared > 100
    if replay:
        layers = SHAPE["moe_layers"]
        assert metrics["r3/replayed_routings"] == batch.routes.valid.sum() * layers
        assert metrics["r3/gap_routings"] == (~batch.routes.valid).sum() * layers
        assert metrics["r3/differing_fraction"] > 0.5, "random routes must differ from the live ones"


def _from_fused(state: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The transformers parameter behind a per-expert name (it keeps experts fused in memory)."""
    if ".experts." not in name:
        return state[name]
    layer, rest = name.split(".experts.")
    expert, matrix, _ = rest.split(".")
    if matrix == "down_proj":
        return state[f"{layer}.experts.down_proj"][int(expert)]
    gate, up = state[f"{layer}.experts.gate_up_proj"][int(expert)].chunk(2)
    return gate if matrix == "gate_proj" else up
