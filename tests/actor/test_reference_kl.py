"""The actor's KL to a reference against the same training written with transformers, and the reference's weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actor.conftest import World
from tests.actor.matrix import (
    CLIP,
    EPSILON,
    LAYOUTS,
    LR,
    NORMALISER,
    TEMPERATURE,
    Case,
    Lesson,
    Trained,
    build_actor,
    exported,
    train_actor,
)
from tests.actor.reference import Reference, compare_metrics, compare_training
from tests.distributed import run_ranks
from tests.peft_adapters import LORA, write_adapter

COEFFICIENT = 0.05


@dataclass
class WithKL(Reference):
    """+ coefficient k on every trained token: with d = log pi - log of the model at the start k2, d^2 / 2, or the KL
    over the rollout's top K, the token and the rest."""

    start: dict[int, torch.Tensor] = field(default_factory=dict)
    estimator: str = "k2"

    def loss(self, sequences: np.ndarray, before: dict[int, torch.Tensor]) -> tuple[torch.Tensor, float]:
        total, size = super().loss(sequences, before)
        scale = len(sequences) * self.normaliser
        for i in sequences:
            logp, rows = self.log_probs(int(i))
            for t, row in enumerate(rows):
                if self.batch.loss_mask[row + 1]:
                    token, start = int(self.batch.token_ids[row + 1]), self.start[int(i)][t]
                    if self.estimator == "k2":
                        kl = (logp[t, token] - start[token]) ** 2 / 2
                    else:
                        kl = torch.zeros((), dtype=torch.float64)
                        members = sorted({token, *self.batch.topk_ids[row + 1].tolist()})
                        for one in members:
                            kl = kl + logp[t, one].exp() * (logp[t, one] - start[one])
                        rest = torch.clamp(1 - logp[t, members].exp().sum(), min=1e-6)
                        kl = kl + rest * (rest / torch.clamp(1 - start[members].exp().sum(), min=1e-6)).log()
                    term = COEFFICIENT * kl / scale
                    total, size = total + term, size + float(term.detach())
        return total, size


def train_rank(rank: int, path: str, layout: dict, lesson: Lesson, case: Case, kls: list[Any]) -> list[Trained]:
    from megatron.core import parallel_state

    results = []
    for kl in kls:
        results.append(train_actor(rank, build_actor(path, layout, case, reference_kl=kl), lesson))
        parallel_state.destroy_model_parallel()
    return results


def kl(coefficient: float, estimator: str = "k2", place: str = "loss") -> Any:
    from megatron_dppo.algorithm import KLEstimator, KLPlace, ReferenceKL

    return ReferenceKL(coefficient=coefficient, estimator=KLEstimator(estimator), place=KLPlace(place))


@pytest.mark.parametrize(
    ("layout", "estimator"),
    [
        ("1 rank", "k2"),
        ("TP2 CP2", "topk"),
        *(pytest.param(name, "k2", marks=pytest.mark.full) for name in ("TP2 EP2", "PP2 CP2")),
        *(pytest.param(name, "topk", marks=pytest.mark.full) for name in ("1 rank", "TP2 EP2", "PP2 CP2", "DP2")),
    ],
)
def test_three_steps_equal_transformers(world: World, layout: str, estimator: str) -> None:
    """With a penalty every gradient and weight, however sequences and vocabulary are split; at a coefficient of 0 what
    the run without one computes, to the bit."""
    ranks, sizes = LAYOUTS[layout]
    case = Case("dppo-binary-tv")
    kls = [None, kl(0.0, estimator), kl(COEFFICIENT, estimator)]
    arguments = (str(world.path), sizes, world.lesson, case, kls)
    without, at_zero, penalised = run_ranks(train_rank, ranks, *arguments)[0]
    for name, weight in without.weights.items():
        np.testing.assert_array_equal(at_zero.weights[name], weight, err_msg=name)
    assert all(
        {k: v for k, v in zero.items() if "reference_kl" not in k and "pulled" not in k}
        == {k: v for k, v in plain.items() if "pulled" not in k}
        for zero, plain in zip(at_zero.metrics, without.metrics, strict=True)
    )

    model = copy.deepcopy(world.model).double()
    model.set_experts_implementation("eager")
    lesson = world.lesson
    reference = WithKL(model, lesson.batch, lesson.advantages, case.preset, NORMALISER, TEMPERATURE, case.replay)
    reference.estimator = estimator
    with torch.no_grad():
        reference.start = {i: reference.log_probs(i)[0] for i in range(len(lesson.batch))}
    history = reference.train(lesson.updates, lr=LR, clip=CLIP, epsilon=EPSILON)
    weights = {name: p.detach().numpy() for name, p in model.named_parameters()}
    compare_training(penalised, history, weights, lesson.updates, layout)
    compare_metrics(penalised.metrics[0], history[:2])
    assert max(np.abs(penalised.weights[name] - weight).max() for name, weight in without.weights.items()) > 1e-5


def sums_rank(
    rank: int, path: str, layout: dict, lesson: Lesson, adapter: Path | None
) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], bool]:
    """By estimator the KL of every sequence to the reference, before and after two steps; whether weights came back."""
    from megatron.core import parallel_state

    from megatron_dppo.actor.actor import TrainingSignal
    from megatron_dppo.batch import InMemorySource

    found, same = {}, True
    for estimator in ("k1", "k3", "topk"):
        lora = None if adapter is None else LORA | {"adapter": adapter}
        actor = build_actor(path, layout, Case("dppo-topk-kl"), lora=lora, reference_kl=kl(0.1, estimator, "reward"))
        source = InMemorySource.of(lesson.batch)
        start = actor.reference_kl(source)
        actor.update(source, TrainingSignal(lesson.advantages, lesson.advantages, lesson.updates[0]))
        before = exported(actor)
        found[estimator] = (start, actor.reference_kl(source))
        after = exported(actor)
        same = same and all(np.array_equal(before[name], weight) for name, weight in after.items())
        parallel_state.destroy_model_parallel()
    return found, same


@pytest.mark.parametrize(
    ("layout", "lora"), [("1 rank", False), ("TP2 EP2", True), pytest.param("PP2 CP2", False, marks=pytest.mark.full)]
)
def test_the_reference_stays_what_it_was(world: World, tmp_path: Path, layout: str, lora: bool) -> None:
    """However far the model has been trained: of all weights the copy, with adapters the model without them."""
    adapter = tmp_path / "adapter" if lora else None
    if adapter:
        write_adapter(adapter, world.model)
    ranks, sizes = LAYOUTS[layout]
    results = run_ranks(sums_rank, ranks, str(world.path), sizes, world.lesson, adapter)
    found, same = results[0]
    assert same
    batch = world.lesson.batch
    reference = Reference(world.model, batch, world.lesson.advantages, "", NORMALISER, TEMPERATURE, True)
    expected: dict[str, list[float]] = {"k1": [], "k3": [], "topk": []}
    for i in range(len(batch)):
        with torch.no_grad():
            logp, rows = reference.log_probs(i)
        k1 = k3 = topk = 0.0
        for t, row in enumerate(rows + 1):
            if batch.loss_mask[row]:
                token = int(batch.token_ids[row])
                d = float(batch.mu_logp[row]) - float(logp[t, token])
                k1, k3 = k1 + d, k3 + np.exp(-d) - 1 + d
                mu = dict(
                    zip(batch.topk_ids[row].tolist(), np.exp(batch.topk_logp[row].astype(np.float64)), strict=True)
                )
                mu |= {token: np.exp(float(batch.mu_logp[row]))}
                topk += sum(p * (np.log(p) - float(logp[t, one])) for one, p in mu.items())
                rest, other = 1 - sum(mu.values()), 1 - sum(float(logp[t, one].exp()) for one in mu)
                topk += max(rest, 1e-6) * np.log(max(rest, 1e-6) / max(other, 1e-6))
        for name, value in (("k1", k1), ("k3", k3), ("topk", topk)):
            expected[name].append(value)
    for name, (start, later) in found.items():
        np.testing.assert_allclose(start, expected[name], rtol=2e-4, atol=2e-4, err_msg=name)
        np.testing.assert_array_equal(later, start, err_msg=name)
