"""The same training written a second time: transformers, autograd, one sequence at a time, AdamW."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import MethodType
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.router_replay.routes import Routes
from tests.actor.matrix import CLIP, EPSILON, LR, NORMALISER, TEMPERATURE, Lesson, Trained

MARGIN = 5e-6
"""Router logits here are about 1 in size, and a float32 forward is off by 1e-6 of that."""

BIAS = "e_score_correction_bias"


def make_rollout(
    model: PreTrainedModel,
    *,
    groups: int,
    samples: int,
    topk: int,
    experts: int,
    k: int,
    temperature: float,
    seed: int,
    moe_layers: int | None = None,
) -> RolloutBatch:
    """Sequences of random tokens, as an engine might have sampled them: mu is the model's own distribution, perturbed.

    Routes are random (so replaying them matters), with the last token of each sequence unrouted and a few gaps more.
    """
    rng = np.random.default_rng(seed)
    vocab = model.config.vocab_size
    moe_layers = moe_layers or len(moe_blocks(model))
    prompts = rng.integers(3, 9, size=groups)
    parts = []
    for group in range(groups):
        for sample in range(samples):
            length = int(rng.integers(2, 12))
            n = int(prompts[group]) + length
            tokens = rng.integers(2, vocab, size=n)
            with torch.no_grad():
                logits = model(torch.tensor(tokens)[None]).logits[0].double()
            noise = torch.from_numpy(rng.standard_normal(logits.shape))
            mu = ((logits + 0.3 * noise) / temperature).log_softmax(-1)
            mu_logp, ids, id_logp = np.zeros(n), np.full((n, topk), -1), np.full((n, topk), -np.inf)
            for t in range(int(prompts[group]), n):
                logps = mu[t - 1]
                if rng.random() < 0.7:  # often a likely token, as sampling would give
                    tokens[t] = int(logps.topk(3).indices[int(rng.integers(3))])
                mu_logp[t] = logps[tokens[t]]
                best = logps.topk(topk)
                ids[t], id_logp[t] = best.indices.numpy(), best.values.numpy()
            chosen = np.argsort(rng.random((n, moe_layers, experts)), axis=-1)[..., :k].astype(np.uint8)
            valid = rng.random(n) < 0.9
            valid[-1] = False
            chosen[~valid] = 0
            parts.append(
                RolloutBatch(
                    token_ids=tokens.astype(np.int32),
                    offsets=np.array([0, n]),
                    prompt_lengths=np.array([prompts[group]], dtype=np.int32),
                    loss_mask=np.arange(n) >= prompts[group],
                    mu_logp=mu_logp.astype(np.float32),
                    topk_ids=ids.astype(np.int32),
                    topk_logp=id_logp.astype(np.float32),
                    routes=Routes(chosen, valid, experts),
                    request_ids=(f"0/{group}/{sample}",),
                    finish_reasons=("stop",),
                    weight_versions=np.zeros(n, dtype=np.int32),
                )
            )
    return RolloutBatch.concatenate(parts)


def moe_blocks(model: PreTrainedModel) -> list[torch.nn.Module]:
    """Of the layers that have experts, in order."""
    return [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]


def router(block: torch.nn.Module) -> torch.nn.Module:
    return block.gate if hasattr(block, "gate") else block.router


def margins(logits: torch.Tensor, k: int) -> torch.Tensor:
    """By how much each row's k-th choice is ahead of the next one."""
    best = logits.detach().topk(k + 1, dim=-1).values
    return best[..., k - 1] - best[..., k]


def within_groups(gate: torch.nn.Module, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores `[..., experts]` of a gate, hopeless where an expert's group is not among those whose two best have the
    largest sums; and by how much the last of those is ahead of the next one."""
    groups, kept = getattr(gate, "num_group", 1), getattr(gate, "topk_group", 1)
    if kept == groups:
        return scores, torch.full(scores.shape[:-1], torch.inf, dtype=scores.dtype)
    of_group = scores.unflatten(-1, (groups, -1))
    best = of_group.topk(2, dim=-1).values.sum(-1)
    allowed = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(kept).indices, True)
    return of_group.masked_fill(~allowed[..., None], -1e9).flatten(-2), margins(best, kept)


def force_routes(model: PreTrainedModel, routes: Routes | None, rows: np.ndarray) -> None:
    """Make every gate of the model pick the recorded experts on `rows`, and its own where there is no record.

    A choice of its own that another processor's rounding could turn fails the test here, by its cause.
    """
    for index, block in enumerate(moe_blocks(model)):
        sigmoid = any(name.endswith(BIAS) for name, _ in block.named_buffers())

        def forward(self, hidden_states, bias=None, index=index, sigmoid=sigmoid):
            logits = hidden_states.reshape(-1, self.hidden_dim) @ self.weight.t()
            if isinstance(getattr(self, "bias", None), torch.nn.Parameter):
                logits = logits + self.bias
            scores = logits
            if sigmoid:
                bias = self.e_score_correction_bias if bias is None else bias
                scores = logits.sigmoid() + bias
            own = torch.from_numpy(~routes.valid[rows]) if routes is not None else slice(None)
            scores, ahead = within_groups(self, scores)
            assert (ahead[own] > MARGIN).all(), f"layer {index}: the choice of groups is {ahead[own].min()} from a tie"
            chosen = scores.topk(self.top_k, dim=-1).indices
            ahead = margins(scores, self.top_k)[own]
            assert (ahead > MARGIN).all(), f"layer {index}: a router's choice is {ahead.min()} from a tie; other seeds"
            if routes is not None:
                record = torch.from_numpy(routes.experts[rows, index].astype(np.int64))
                chosen = torch.where(torch.from_numpy(routes.valid[rows])[:, None], record, chosen)
            if sigmoid:
                weights = logits.sigmoid().gather(1, chosen)
                weights = weights / weights.sum(-1, keepdim=True) * getattr(self, "routed_scaling_factor", 1.0)
            elif getattr(self, "norm_topk_prob", True):  # a router without the setting always does
                weights = logits.gather(1, chosen).softmax(-1)
            else:
                weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights, chosen

        router(block).forward = MethodType(forward, router(block))


class Step(NamedTuple):
    """One gradient step of the reference."""

    loss: float
    size: float
    """The sum of the sizes of the loss's terms, which cancel in it."""
    norm: float
    gradients: dict[str, np.ndarray]
    """Before clipping."""
    sensitivity: float
    loss_moved: float
    """Both: see `Reference._sensitivity`."""


@dataclass
class Reference:
    """Trains `model` on a rollout with one objective, by the paper's formulas."""

    model: PreTrainedModel
    batch: RolloutBatch
    advantages: np.ndarray
    preset: str
    normaliser: float
    temperature: float
    replay: bool

    def log_probs(self, sequence: int) -> tuple[torch.Tensor, np.ndarray]:
        """All log-probabilities `[n - 1, V]` (row t predicts token t + 1), and the rows that are trained."""
        start, stop = self.batch.offsets[sequence], self.batch.offsets[sequence + 1]
        force_routes(self.model, self.batch.routes if self.replay else None, np.arange(start, stop))
        tokens = torch.from_numpy(self.batch.token_ids[start:stop].astype(np.int64))
        logits = self.model(tokens[None]).logits[0, :-1].double()
        return (logits / self.temperature).log_softmax(-1), np.arange(start, stop - 1)

    def _mean_ratio(self, sequence: int, logp: torch.Tensor, rows: np.ndarray) -> float:
        """GSPO's ratio of a sequence: the geometric mean over its sampled tokens."""
        logs = [
            float(logp[t, int(self.batch.token_ids[row + 1])].detach()) - float(self.batch.mu_logp[row + 1])
            for t, row in enumerate(rows)
            if self.batch.loss_mask[row + 1]
        ]
        return math.exp(sum(logs) / len(logs))

    def loss(self, sequences: np.ndarray, before: dict[int, torch.Tensor]) -> tuple[torch.Tensor, float]:
        """The loss, and the sum of the sizes of its terms."""
        total, size = torch.zeros((), dtype=torch.float64), 0.0
        for i in sequences:
            logp, rows = self.log_probs(int(i))
            for t, row in enumerate(rows):
                if not self.batch.loss_mask[row + 1]:
                    continue
                token, advantage = int(self.batch.token_ids[row + 1]), float(self.advantages[i])
                mu, pi = math.exp(self.batch.mu_logp[row + 1]), float(logp[t, token].detach().exp())
                if self.preset == "gspo":
                    ratio = self._mean_ratio(int(i), logp, rows)
                    blocked = ratio > 1.05 if advantage > 0 else ratio < 0.95
                    share = (
                        self.normaliser / self.batch.loss_mask[self.batch.offsets[i] : self.batch.offsets[i + 1]].sum()
                    )
                else:
                    ratio, share = min(pi / mu, self._cap()), 1.0
                    logps = logp[t].detach()
                    blocked = self._blocked(row + 1, token, advantage, mu, pi, logps, before.get(int(i)), t)
                if not blocked:
                    total = total - share * ratio * advantage * (1 + logp[t, token] - logp[t, token].detach())
                    size += float(abs(share * ratio * advantage))
        scale = len(sequences) * self.normaliser
        return total / scale, size / scale

    def _cap(self) -> float:
        return {"minirl": math.inf}.get(self.preset, 5.0)

    def _blocked(self, row, token, advantage, mu, pi, logps, before, t) -> bool:
        away = pi > mu if advantage > 0 else pi < mu
        if self.preset == "dppo-binary-tv":
            return away and abs(pi - mu) > 0.2
        if self.preset == "dppo-topk-kl":
            ids, logs = self.batch.topk_ids[row], self.batch.topk_logp[row].astype(np.float64)
            members = dict(zip(ids.tolist(), np.exp(logs), strict=True)) | {token: mu}
            kl = sum(m * (math.log(m) - float(logps[i])) for i, m in members.items())
            other_mu = max(1 - sum(members.values()), 1e-6)
            other_pi = max(1 - sum(float(logps[i].exp()) for i in members), 1e-6)
            return away and kl + other_mu * math.log(other_mu / other_pi) > 0.05
        ratio = pi / mu if self.preset == "grpo-clip-higher" else pi / float(before[t, token].exp())
        high = 0.27 if self.preset == "grpo-clip-higher" else 0.28
        return ratio > 1 + high if advantage > 0 else ratio < 0.8

    def train(self, updates: list[list[np.ndarray]], *, lr: float, clip: float, epsilon: float) -> list[Step]:
        """One AdamW step per mini-batch."""
        threads = torch.get_num_threads()
        torch.set_num_threads(
            1
        )  # for products this small threads only wait for each other, on a busy machine for minutes
        try:
            return self._train(updates, lr, clip, epsilon)
        finally:
            torch.set_num_threads(threads)

    def _train(self, updates: list[list[np.ndarray]], lr: float, clip: float, epsilon: float) -> list[Step]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.999), eps=epsilon, weight_decay=0.0)
        history = []
        for mini_batches in updates:
            before: dict[int, torch.Tensor] = {}
            if self.preset == "minirl":
                with torch.no_grad():
                    before = {int(i): self.log_probs(int(i))[0] for batch in mini_batches for i in batch}
            for sequences in mini_batches:
                optimizer.zero_grad()
                loss, size = self.loss(sequences, before)
                loss.backward()
                trained = ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)
                gradients = {name: p.grad.numpy().copy() for name, p in trained}
                sensitivity, loss_moved = self._sensitivity(sequences, before, float(loss.detach()))
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), clip)
                optimizer.step()
                history.append(Step(float(loss.detach()), size, float(norm), gradients, sensitivity, loss_moved))
        return history

    def _sensitivity(self, sequences: np.ndarray, before: dict[int, torch.Tensor], exact: float) -> tuple[float, float]:
        """How far the gradient moves, as a share of its norm, and the loss when every weight, one that is not trained
        too, is off by a rounding of float32 (the larger of two tries). Leaves weights and gradients as they are."""
        generator = torch.Generator().manual_seed(0)
        parameters = list(self.model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        weights, gradients = [p.detach().clone() for p in parameters], [p.grad for p in trained]
        norm, moved, loss_moved = torch.nn.utils.get_total_norm(gradients), 0.0, 0.0
        for _ in range(2):
            for parameter, weight in zip(parameters, weights, strict=True):
                noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
                parameter.data.copy_(weight * (1 + 2.0**-24 * noise))
                parameter.grad = None
            loss = self.loss(sequences, before)[0]
            loss.backward()
            loss_moved = max(loss_moved, abs(float(loss.detach()) - exact))
            change = [p.grad - gradient for p, gradient in zip(trained, gradients, strict=True)]
            moved = max(moved, float(torch.nn.utils.get_total_norm(change) / norm))
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data.copy_(weight)
        for parameter, gradient in zip(trained, gradients, strict=True):
            parameter.grad = gradient
        return moved, loss_moved


def by_hf_name(state: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The entry behind a per-expert name of a state whose experts are fused, as transformers keeps them in memory."""
    name = name.replace(".block_sparse_moe.", ".mlp.").replace("model.language_model.", "model.")
    if ".experts." not in name or name in state:
        return state[name]
    layer, rest = name.split(".experts.")
    expert, matrix, _ = rest.split(".")
    if matrix in ("down_proj", "w2"):
        return state[f"{layer}.experts.down_proj"][int(expert)]
    gate, up = np.split(state[f"{layer}.experts.gate_up_proj"][int(expert)], 2)
    return gate if matrix in ("gate_proj", "w1") else up


def compare_metrics(
    metrics: dict[str, float], steps: Sequence[Step], case: str = "", rel: float = 2e-5, before: int = 0
) -> None:
    """The mean loss and gradient norm of the steps of one update, after so many steps `before`.

    A loss is a sum of ratios times advantages, and each ratio is off by the error of its log-probability (logits of up
    to 20 at the temperature of the tests, in float32): by `rel` of the sum of the terms' sizes, whatever it comes to,
    or more where a rounding of the weights moves the loss by more, of which each step makes another. After steps before
    the weights have their roundings, independent ones: it is off by the root of their number more. (In float64, with
    weights rounded once a step, the third loss of a Kimi-K2 moves by 3e-8, and its layouts differ by 4e-8.)
    """
    rel *= (1 + before) ** 0.5
    moved = (before + len(steps)) * np.mean([step.loss_moved for step in steps])
    off = max(rel * np.mean([step.size for step in steps]), 2 * moved)
    assert metrics["optimizer/loss"] == pytest.approx(np.mean([s.loss for s in steps]), rel=0, abs=off), case
    assert metrics["optimizer/grad_norm"] == pytest.approx(np.mean([s.norm for s in steps]), rel=1.5 * rel), case
    assert metrics["optimizer/grad_norm_max"] == pytest.approx(max(s.norm for s in steps), rel=1.5 * rel), case


def compare_training(
    got: Trained, history: list[Step], weights: dict[str, np.ndarray], updates: list[list[np.ndarray]], case: str
) -> None:
    """Losses, norms, every gradient and the weights at the end; `history` and `weights` are `Reference`'s.

    Gradients may be off by two roundings of float32: 2e-6 of the norm in most steps, more where the step itself is
    sensitive (live routes, a peaked distribution: one rounding of the weights can move a gradient by 5e-6 of its norm).
    """
    before = 0
    for metrics, mini_batches in zip(got.metrics, updates, strict=True):
        compare_metrics(metrics, history[before : before + len(mini_batches)], case, before=before)
        before += len(mini_batches)
    assert len(got.gradients) == len(history)
    for number, (gradients, step) in enumerate(zip(got.gradients, history, strict=True)):
        assert len(gradients) > 50
        moved = step.sensitivity
        assert moved < 2e-5, f"{case}: step {number} says nothing, a rounding moves its gradient by {moved}"
        off = step.norm * max(2e-6, 2 * moved)
        for name, gradient in gradients.items():
            if name.endswith(BIAS):  # a buffer: what is exported here is its value
                continue
            right, where = by_hf_name(step.gradients, name), f"{case}: gradient {number} of {name}"
            np.testing.assert_allclose(gradient, right, atol=off, rtol=1e-5, err_msg=where)
    for name, tensor in got.weights.items():
        np.testing.assert_allclose(tensor, by_hf_name(weights, name), atol=2e-6, rtol=0, err_msg=f"{case}: {name}")


def expected_training(
    model: PreTrainedModel, lesson: Lesson, preset: str, replay: bool
) -> tuple[list[Step], dict[str, np.ndarray]]:
    """Each step, and the weights after all, of a float64 copy of `model`."""
    trained = copy.deepcopy(model).double()
    trained.set_experts_implementation("eager")  # the grouped product has no float64
    reference = Reference(trained, lesson.batch, lesson.advantages, preset, NORMALISER, TEMPERATURE, replay)
    history = reference.train(lesson.updates, lr=LR, clip=CLIP, epsilon=EPSILON)
    state = {**dict(trained.named_parameters()), **dict(trained.named_buffers())}
    return history, {name: tensor.detach().numpy() for name, tensor in state.items()}
