"""What a training actor does on one GPU with TransformerEngine that a CPU cannot show; every finding in one JSON line.

torchrun --nproc-per-node 1 -m tests.gpu.actor_steps FOLDER [NAME ...]
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from actor_step.stock import stock_kernels, stock_optimizer

from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
from megatron_dppo.actor.multi_tensor import prepare_step
from megatron_dppo.actor.optimizer import guarded_step
from megatron_dppo.actor.runtime import stop
from megatron_dppo.batch import InMemorySource, RolloutBatch
from megatron_dppo.checkpoint.state_parts import distributed_parts
from megatron_dppo.checkpoint.training_state import TrainingStates
from tests.actor.matrix import SHAPE, Case, advantages, build_actor
from tests.actor.reference import make_rollout
from tests.tiny import tiny_model

SIZES = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128, "head_dim": 64}
ADAM = {"lr": 1e-3, "epsilon": 1e-8, "weight_decay": 0.01}


class Bench:
    """Makes actors of one model and trains them on one rollout."""

    def __init__(self, folder: Path, family: str = "qwen3_moe", **sizes: int) -> None:
        self.folder, self.model = folder, str(folder / family)
        model = tiny_model(family, self.model, seed=3, **(SIZES | sizes))
        self.batch: RolloutBatch = make_rollout(model, seed=4, temperature=1.0, **SHAPE)

    def actor(self, dtype: str = "bfloat16", case: Case | None = None, **options: Any) -> MegatronActor:
        from megatron.core import parallel_state

        if parallel_state.is_initialized():
            parallel_state.destroy_model_parallel()
        return build_actor(self.model, {}, case or Case(), dtype=dtype, temperature=1.0, **(ADAM | options))

    def updates(self, actor: MegatronActor, number: int, worth: np.ndarray | None = None) -> list[dict[str, float]]:
        worth = advantages() if worth is None else worth
        signal = TrainingSignal(worth, worth, [np.arange(len(worth))])
        return [actor.update(InMemorySource.of(self.batch), signal).metrics for _ in range(number)]


def given_step(actor: MegatronActor, number: int) -> float:
    """An optimizer step on gradients that depend on its number alone, since kernels that make real ones may add up in
    another order from run to run; the norm."""
    generator = torch.Generator(actor.runtime.device).manual_seed(number)
    for chunk in actor.chunks:
        chunk.zero_grad_buffer()
        for parameter in chunk.parameters():
            parameter.main_grad.normal_(generator=generator)
    prepare_step(actor.optimizer)
    return guarded_step(actor.optimizer, actor.scheduler, loss_is_finite=True).grad_norm


def weights(actor: MegatronActor) -> list[torch.Tensor]:
    """Copies of the model's weights."""
    return [p.detach().cpu().clone() for chunk in actor.model for p in chunk.parameters()]


def masters(actor: MegatronActor) -> list[torch.Tensor]:
    """Copies of master weights and moments, float32."""
    tensors = []
    for part in distributed_parts(actor.optimizer):
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                moments = part.optimizer.state[parameter]
                tensors += [moments.get("master_param", parameter), moments["exp_avg"], moments["exp_avg_sq"]]
    return [t.detach().cpu().clone() for t in tensors]


def state(actor: MegatronActor) -> list[torch.Tensor]:
    return weights(actor) + masters(actor)


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gap(left: list[torch.Tensor], right: list[torch.Tensor]) -> float:
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(left, right, strict=True))


def loss_scaling(bench: Bench) -> dict[str, Any]:
    """float16 from a scale that overflows; bfloat16 beside it."""
    half = bench.updates(bench.actor("float16", initial_loss_scale=2.0**30), 20)
    brain = bench.updates(bench.actor(), 2)
    keys = ("optimizer/loss", "optimizer/grad_norm", "optimizer/overflowed_steps", "optimizer/loss_scale")
    return {"half": [[m[k] for k in keys] for m in half], "brain": [[m[k] for k in keys] for m in brain]}


def few_launches(bench: Bench) -> dict[str, Any]:
    """Three given steps by our optimizer and by Megatron-Core's own."""
    actor = bench.actor()
    norms = [given_step(actor, n) for n in range(3)]
    ours = masters(actor)
    actor = bench.actor()
    with stock_optimizer(actor.optimizer):
        stock = [given_step(actor, n) for n in range(3)]
    return {"norms": norms, "stock": stock, "gap": gap(ours, masters(actor))}


def experts(bench: Bench) -> dict[str, Any]:
    """Gradients of one batch by our experts and by stock ones, and whether the host waits inside a layer of experts."""
    actor = bench.actor(lr=0.0, clip_grad=0.0)  # neither weights nor gradients change after the backward
    layer = actor.model[0].decoder.layers[0].mlp
    hidden = torch.randn(64, 1, SIZES["hidden_size"], device="cuda", dtype=torch.bfloat16, requires_grad=True)
    found: dict[str, Any] = {"why_not": layer.experts.why_not(hidden)}
    gradients: dict[str, dict[str, torch.Tensor]] = {}
    for name in ("ours", "stock"):
        with stock_kernels(actor) if name == "stock" else nullcontext():
            found[name] = bench.updates(actor, 1)[0]["optimizer/loss"]
        gradients[name] = {n: p.main_grad.clone() for n, p in actor.model[0].named_parameters()}
    stock = gradients["stock"]
    found["differences"] = {
        n: float((g - stock[n]).norm() / (stock[n].norm() + 1e-20)) for n, g in gradients["ours"].items()
    }
    layer(hidden)[0].sum().backward()  # kernels are compiled
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(hidden)[0].sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return found


def biased_experts(bench: Bench) -> dict[str, Any]:
    """The same of gpt-oss's experts, and an update with their activation computed again."""
    other = Bench(bench.folder, "gpt_oss", intermediate_size=128)
    ways = {how: other.updates(other.actor(case=Case(recompute=how)), 1)[0] for how in ("none", "activation")}
    norms = {how: [m["optimizer/loss"], m["optimizer/grad_norm"]] for how, m in ways.items()}
    return experts(other) | {"recompute": norms}


def offload(bench: Bench) -> dict[str, Any]:
    """Given steps with everything moved to the host and back between them, and without; then a real update of each."""
    found: dict[str, Any] = {}
    states, losses = [], []
    for moves in (False, True):
        actor = bench.actor()
        given_step(actor, 0)
        if moves:
            before, held = state(actor), torch.cuda.memory_allocated()
            freed = actor.offload()
            found["bytes"] = [held, freed, torch.cuda.memory_allocated()]
            actor.onload()
            actor.offloader.arrive()
            found["parameters"] = sum(p.numel() for chunk in actor.model for p in chunk.parameters())
            found["kept"] = same(state(actor), before)
        given_step(actor, 1)
        states.append(state(actor))
        losses.append(bench.updates(actor, 1)[0]["optimizer/loss"])
    return found | {"next_step": same(*states), "losses": losses}


def state_on_the_host(bench: Bench) -> dict[str, Any]:
    """Given steps with all, half or none of the optimizer state on the host; a training state saved and loaded."""
    found: dict[str, Any] = {"gaps": {}, "losses": {}, "bytes": {}}
    expected: list[torch.Tensor] = []
    for fraction in (0.0, 0.5, 1.0):
        gc.collect()
        before = torch.cuda.memory_allocated()
        actor = bench.actor(cpu_offload_fraction=fraction)
        for number in range(3):
            given_step(actor, number)
        found["bytes"][str(fraction)] = torch.cuda.memory_allocated() - before
        reached = masters(actor)
        expected = expected or reached
        found["gaps"][str(fraction)] = gap(reached, expected)
        if fraction == 0.5:
            found |= _saved_and_loaded(bench, actor, fraction)
        else:
            given_step(actor, 3)
        found["losses"][str(fraction)] = bench.updates(actor, 1)[0]["optimizer/loss"]
        del actor
    return found


def _saved_and_loaded(bench: Bench, actor: MegatronActor, fraction: float) -> dict[str, Any]:
    """How far a loaded state is from the saved one, and the step after it from the step after saving."""
    TrainingStates(bench.folder / "states", actor.trainee).save(3, {})
    saved = state(actor)
    given_step(actor, 3)
    fresh = bench.actor(cpu_offload_fraction=fraction)
    TrainingStates(bench.folder / "states", fresh.trainee).load()
    loaded = gap(state(fresh), saved)
    given_step(fresh, 3)
    return {"loaded": loaded, "next_step": gap(masters(fresh), masters(actor))}


def auxiliary_losses(bench: Bench) -> dict[str, Any]:
    """Gradient norms with the policy loss switched off: router losses of one size, twice that, and in small packs."""
    nothing = np.zeros(len(bench.batch))
    found: dict[str, Any] = {}
    for name, aux, budget in (
        ("none", (0.0, 0.0), 64),
        ("once", (0.5, 0.05), 64),
        ("twice", (1.0, 0.1), 64),
        ("z", (0.0, 0.05), 64),
        ("z, whole", (0.0, 0.05), 1000),
    ):
        actor = bench.actor(case=Case(replay=False, budget=budget), aux=aux)
        metrics = bench.updates(actor, 1, nothing)[0]
        found[name] = {k: v for k, v in metrics.items() if k.startswith("moe/") or k == "optimizer/grad_norm"}
    return found


def overlaps(bench: Bench) -> dict[str, Any]:
    """Losses of three updates with collectives where they are, and moved beside the work."""
    ways = {"plain": {}, "reduce": {"overlap_grad_reduce": True}}
    ways["gather"] = ways["reduce"] | {"overlap_param_gather": True}
    return {n: [m["optimizer/loss"] for m in bench.updates(bench.actor(**o), 3)] for n, o in ways.items()}


def recompute(bench: Bench) -> dict[str, Any]:
    """Loss and norm of an update with activations kept and recomputed, recorded routes replayed."""
    found = {}
    ways = {how: Case(recompute=how) for how in ("none", "activation", "selective", "full")}
    ways["first layer"] = Case(recompute="full", recompute_layers=1)
    for how, case in ways.items():
        metrics = bench.updates(bench.actor(case=case), 1)[0]
        found[how] = [metrics["optimizer/loss"], metrics["optimizer/grad_norm"]]
    return found


ORDER = (
    few_launches,
    experts,
    biased_experts,
    loss_scaling,
    offload,
    auxiliary_losses,
    overlaps,
    recompute,
    state_on_the_host,
)
CHECKS: dict[str, Callable[[Bench], dict[str, Any]]] = {check.__name__: check for check in ORDER}


def main(folder: Path, names: list[str]) -> dict[str, Any]:
    """Every check by its name; one that fails leaves its traceback and does not stop the others."""
    bench, found = Bench(folder), {}
    for name in names or list(CHECKS):
        try:
            found[name] = CHECKS[name](bench)
        except Exception:
            found[name] = {"error": traceback.format_exc()}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
    stop()
