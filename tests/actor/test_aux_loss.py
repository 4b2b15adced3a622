"""Router losses against their definition in float64, over microbatches and layouts; the policy loss is switched off."""

from __future__ import annotations

from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch

from megatron_dppo.actor.pack_shape import Split
from megatron_dppo.actor.packing import plan_packs
from megatron_dppo.batch import RolloutBatch
from tests.actor.matrix import LAYOUTS, Case, build_actor, exported, gradients_as_weights
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

LENGTHS = np.array([8, 12, 4, 16, 8, 4, 12, 20])
"""Multiples of what context and sequence parallelism ask for, so that no layout pads."""
EXPERTS, K, LAYERS = 8, 2, 4
BOTH = (0.7, 0.05)


def rollout() -> RolloutBatch:
    rng = np.random.default_rng(5)
    tokens = int(LENGTHS.sum())
    offsets = np.append(0, np.cumsum(LENGTHS))
    return RolloutBatch(
        token_ids=rng.integers(2, 300, size=tokens).astype(np.int32),
        offsets=offsets,
        prompt_lengths=np.ones(len(LENGTHS), dtype=np.int32),
        loss_mask=~np.isin(np.arange(tokens), offsets[:-1]),
        mu_logp=np.full(tokens, -5.0, dtype=np.float32),
        topk_ids=np.full((tokens, 1), -1, dtype=np.int32),
        topk_logp=np.full((tokens, 1), -np.inf, dtype=np.float32),
        routes=None,
        request_ids=tuple(f"0/{i}/0" for i in range(len(LENGTHS))),
        finish_reasons=("stop",) * len(LENGTHS),
        weight_versions=np.zeros(tokens, dtype=np.int32),
    )


def gradients(rank: int, path: str, batch: RolloutBatch, runs: list[tuple[str, Case, Any]]) -> list[Any]:
    """(gradients by Hugging Face name, metrics) of one step with all advantages zero, for every (layout, case, aux)."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found = []
    for layout, case, aux in runs:
        actor = build_actor(path, LAYOUTS[layout][1], case, aux=aux)
        prepare, seen = actor.optimizer.prepare_grads, []

        def recording(actor: Any = actor, prepare: Any = prepare, seen: list = seen) -> Any:
            with gradients_as_weights(actor.chunks):
                seen.append(exported(actor))
            return prepare()

        actor.optimizer.prepare_grads = recording
        nothing = np.zeros(len(batch))
        metrics = actor.update(
            InMemorySource.of(batch), TrainingSignal(nothing, nothing, [np.arange(len(batch))])
        ).metrics
        found.append((seen[0], metrics))
        parallel_state.destroy_model_parallel()
    return found


def expected(model: Any, batch: RolloutBatch, budget: int, layout: str, aux: tuple[float, float]) -> Any:
    """The sum of the class's docstring, by transformers and autograd, sequence by sequence."""
    ranks, sizes = LAYOUTS[layout]
    context, tensor = sizes.get("context", 1), sizes.get("tensor", 1)
    data = ranks // (context * tensor * sizes.get("pipeline", 1))
    plan = plan_packs(LENGTHS, budget=budget, data_parallel=data, split=Split(context=context, sequence=tensor))
    assert plan.padded_rows == LENGTHS.sum()
    logits: list[torch.Tensor] = []

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        z = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.t()
        logits.append(z)
        chosen = z.topk(self.top_k, dim=-1).indices
        return z, z.gather(1, chosen).softmax(-1), chosen

    for layer in model.model.layers:
        layer.mlp.gate.forward = MethodType(forward, layer.mlp.gate)
    model.zero_grad()
    total, sums = torch.zeros((), dtype=torch.float64), np.zeros(2)
    packs = [pack for rank in plan.packs for pack in rank]
    for pack in packs:
        per_layer: list[list[torch.Tensor]] = [[] for _ in range(LAYERS)]
        for i in pack:
            logits.clear()
            model(torch.from_numpy(batch.token_ids[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))[None])
            for layer, z in enumerate(logits):
                per_layer[layer].append(z)
        for parts in per_layer:
            z = torch.cat(parts)
            share = torch.zeros(len(z), EXPERTS, dtype=torch.float64).scatter(1, z.topk(K).indices, 1.0).mean(0) / K
            balance = EXPERTS * (share * z.softmax(-1).mean(0)).sum()
            size = z.logsumexp(-1).square().mean()
            total = total + len(z) / LENGTHS.sum() * (aux[0] * balance + aux[1] * size)
            sums += np.array([float(balance), float(size)]) / (LAYERS * len(packs))
    total.backward()
    named = model.named_parameters()
    return {name: p.grad for name, p in named if p.grad is not None and ".experts." not in name}, sums


SMALL, WHOLE = Case(replay=False, budget=32), Case(replay=False, budget=1000)
RUNS = {
    1: [
        ("1 rank", SMALL, BOTH),
        ("1 rank", WHOLE, BOTH),
        ("1 rank", Case(replay=False, budget=32, recompute="full"), BOTH),
        ("1 rank", SMALL, (0.0, 0.05)),
        ("1 rank", SMALL, (0.0, 0.0)),
    ],
    2: [
        ("TP2 EP2", SMALL, BOTH),
        ("DP2", SMALL, BOTH),
        ("EP2", SMALL, BOTH),
        ("CP2", SMALL, BOTH),
        ("PP2", SMALL, BOTH),
    ],
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_equal_the_definition(tmp_path, ranks: int) -> None:
    model = tiny_qwen3_moe(tmp_path, seed=3).double()
    model.set_experts_implementation("eager")
    batch = rollout()
    results = run_ranks(gradients, ranks, str(tmp_path), batch, RUNS[ranks])
    for (layout, case, aux), (got, metrics) in zip(RUNS[ranks], results[0], strict=True):
        label = f"{layout}, {case.budget}, {case.recompute}, {aux}"
        if aux == (0.0, 0.0):
            assert all(np.count_nonzero(g) == 0 for g in got.values())
            assert not any(name.startswith("moe/") for name in metrics)
            continue
        everything, means = expected(model, batch, case.budget, layout, aux)
        for name, gradient in everything.items():
            scale, ours = gradient.abs().max().item(), got[name]
            np.testing.assert_allclose(ours, gradient.numpy(), atol=2e-4 * scale, rtol=0, err_msg=f"{label} {name}")
            assert scale > 0 or "layers.3" in name or not name.startswith("model.layers"), "it reaches the layers below"
        if aux[0]:
            assert metrics["moe/load_balancing_loss"] == pytest.approx(means[0], rel=1e-4), label
        else:
            assert "moe/load_balancing_loss" not in metrics
        assert metrics["moe/router_z_loss"] == pytest.approx(means[1], rel=1e-4), label
