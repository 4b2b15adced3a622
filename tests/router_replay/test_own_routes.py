"""R2: the experts of the pass before the update are replayed in it, for every mini-batch, under any layout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_dppo.router_replay.routes import Routes
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

MINI_BATCHES = [np.arange(0, 3), np.arange(3, 6)]
LR = 5e-2  # so large that the second mini-batch is routed otherwise by the weights of the first step
LAYOUTS = {
    "1 rank": (1, {}),
    "TP2 EP2": (2, {"tensor": 2, "expert": 2, "sequence_parallel": True}),
    "PP2 VPP2": (2, {"pipeline": 2, "virtual_pipeline": 2}),
}


def train_on_rank(rank: int, path: str, layout: dict, mode: str, recompute: str, batch) -> tuple[dict, dict]:
    from megatron_dppo.batch import InMemorySource
    from tests.router_replay.actor_ranks import build_actor, signal

    actor = build_actor(path, layout, preset="minirl", mode=mode, recompute=recompute, lr=LR)
    metrics = actor.update(InMemorySource.of(batch), signal(MINI_BATCHES)).metrics
    return metrics, {name: tensor.numpy() for name, tensor in actor.export_weights() if tensor is not None}


@torch.no_grad()
def own_routes(model, batch) -> Routes:
    """What transformers' routers choose with the weights at hand."""
    from tests.actor.reference import MARGIN, margins

    chosen = []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        tokens = torch.from_numpy(batch.token_ids[start:stop].astype(np.int64))[None]
        logits = model(tokens, output_router_logits=True).router_logits
        assert all((margins(layer, 2) > MARGIN).all() for layer in logits), "a choice near a tie; other seeds"
        chosen.append(torch.stack([layer.topk(2, dim=-1).indices for layer in logits], dim=1).numpy())
    experts = np.concatenate(chosen).astype(np.uint8)
    return Routes(experts, np.ones(len(experts), dtype=bool), 8)


@pytest.mark.parametrize(("layout", "recompute"), [("1 rank", "full"), ("TP2 EP2", "none"), ("PP2 VPP2", "full")])
def test_the_update_uses_the_routes_of_the_pass_before_it(tmp_path, layout, recompute):
    from tests.actor.matrix import NORMALISER
    from tests.actor.reference import Reference, compare_metrics, make_rollout
    from tests.router_replay.actor_ranks import ADVANTAGES, SHAPE, TEMPERATURE

    model = tiny_qwen3_moe(tmp_path, seed=3)
    model.model.embed_tokens.padding_idx = None
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **SHAPE)
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(train_on_rank, ranks, str(tmp_path), sizes, "r2", recompute, batch)

    own = replace(batch, routes=own_routes(model, batch))
    reference = Reference(model.float(), own, ADVANTAGES, "minirl", NORMALISER, TEMPERATURE, True)
    history = reference.train([MINI_BATCHES], lr=LR, clip=1.0, epsilon=1e-3)
    metrics, weights = results[0]
    tokens, layers = len(batch.token_ids), SHAPE["moe_layers"]
    assert metrics["r3/recorded_routings"] == metrics["r3/replayed_routings"] == tokens * layers
    assert metrics["r3/gap_routings"] == 0
    assert metrics["r3/recomputed_routings"] == (tokens * layers if recompute == "full" else 0)
    assert 0.05 < metrics["r3/differing_fraction"] < 0.5, "the first mini-batch agrees, the second must not"
    compare_metrics(metrics, history, rel=6e-5)  # the reference is in float32 itself
    state = {name: p.detach() for name, p in model.named_parameters()}
    for name in ("lm_head.weight", "model.layers.0.mlp.gate.weight", "model.layers.3.mlp.gate.weight"):
        np.testing.assert_allclose(weights[name], state[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("mode", ["r2", "r3"])
def test_a_pipeline_stage_without_experts_takes_part(tmp_path, mode):
    """The first stage is dense: it replays nothing, and the accounts are still those of one rank."""
    from tests.actor.reference import make_rollout
    from tests.router_replay.actor_ranks import SHAPE, TEMPERATURE

    model = tiny_qwen3_moe(tmp_path, seed=3, mlp_only_layers=[0, 1])
    batch = make_rollout(model, seed=4, temperature=TEMPERATURE, **(SHAPE | {"moe_layers": 2}))
    ((alone, _),) = run_ranks(train_on_rank, 1, str(tmp_path), {}, mode, "full", batch)
    for metrics, _ in run_ranks(train_on_rank, 2, str(tmp_path), {"pipeline": 2}, mode, "full", batch):
        for name in ("recorded", "sent", "replayed", "recomputed", "gap"):
            assert metrics[f"r3/{name}_routings"] == alone[f"r3/{name}_routings"]
        assert metrics["optimizer/loss"] == pytest.approx(alone["optimizer/loss"], rel=1e-4)
    routed = len(batch.token_ids) if mode == "r2" else batch.routes.valid.sum()
    assert alone["r3/replayed_routings"] == 2 * routed
