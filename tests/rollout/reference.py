"""What transformers says about a rollout, in fp32."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.models.family import transformers_config
from tests.actor.reference import moe_blocks, router, within_groups


@dataclass(frozen=True)
class Reference:
    """Per token of a batch, as `RolloutBatch` numbers them.

    logps    float64 `[N, V]` log-softmax of logits / temperature that the token was drawn from; 0 for first tokens
    experts  `[N, L, k]` expert ids of the token's own forward, best first
    margin   `[N, L]` score of the last chosen expert minus that of the first one left out, or of groups if less
    """

    logps: np.ndarray
    experts: np.ndarray
    margin: np.ndarray


def load(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path, config=transformers_config(path), dtype=torch.float32).eval()


@torch.no_grad()
def reference(model: PreTrainedModel, batch: RolloutBatch, temperature: float = 1.0) -> Reference:
    topk = model.config.num_experts_per_tok
    parts, experts, margins = [], [], []
    blocks = moe_blocks(model)
    seen: dict[int, torch.Tensor] = {}
    hooks = [
        router(block).register_forward_hook(lambda _, given, out, i=i: seen.__setitem__(i, out[0]))
        for i, block in enumerate(blocks)
    ]
    for b in range(len(batch)):
        ids = torch.from_numpy(batch.token_ids[batch.offsets[b] : batch.offsets[b + 1]].astype(np.int64))[None]
        out = model(ids)
        logps = torch.log_softmax(out.logits[0].double() / temperature, dim=-1)
        parts.append(torch.cat([torch.zeros_like(logps[:1]), logps[:-1]]))
        of_layers = [within_groups(router(block), _scores(block, seen[i].double())) for i, block in enumerate(blocks)]
        scores, ahead = (torch.stack(each, dim=1) for each in zip(*of_layers, strict=True))
        best = scores.topk(topk + 1, dim=-1)
        experts.append(best.indices[..., :topk])
        margins.append(torch.minimum(best.values[..., topk - 1] - best.values[..., topk], ahead))
    for hook in hooks:
        hook.remove()
    return Reference(torch.cat(parts).numpy(), torch.cat(experts).numpy(), torch.cat(margins).numpy())


def _scores(block: torch.nn.Module, logits: torch.Tensor) -> torch.Tensor:
    """By which experts are chosen."""
    bias = [b.double() for name, b in block.named_buffers() if name.endswith("e_score_correction_bias")]
    return logits.sigmoid() + bias[0] if bias else logits.softmax(-1)


def other_weights(path: Path, seed: int) -> dict[str, torch.Tensor]:
    """A full set of other weights by on-disk name, for a weight sync."""
    from safetensors.torch import load_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            spread = tensor.std() if tensor.ndim > 1 else 0.2
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            weights[name] = torch.randn(tensor.shape, generator=generator) * spread + centre
    return weights


def model_with(path: Path, weights: dict[str, torch.Tensor], folder: Path) -> PreTrainedModel:
    """The model of `path` with `weights`, by way of a checkpoint on disk (so that transformers does the naming)."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    AutoConfig.from_pretrained(path).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    gc.collect()
    return load(folder)


def compare_law(batch: RolloutBatch, expected: Reference) -> float:
    """Largest |log mu - reference| over sampled tokens and over every recorded top-K column. A sequence is compared up
    to a router's near tie that fell the other way: from there on it is another law. Such rows must be few."""
    rows = np.flatnonzero(batch.loss_mask & ~_behind_ties(batch, expected))
    if batch.routes is not None:
        pairs, _, excused = compare_routes(batch, expected)
        assert excused <= 1 + pairs // 1000
    worst = np.abs(batch.mu_logp[rows] - expected.logps[rows, batch.token_ids[rows]]).max()
    if batch.top_k:
        ids = batch.topk_ids[rows]
        worst = max(worst, np.abs(batch.topk_logp[rows] - np.take_along_axis(expected.logps[rows], ids, axis=1)).max())
    return float(worst)


NEAR_TIE = 1e-5
"""Margin under which float32 decides how a router chooses."""


def compare_routes(batch: RolloutBatch, expected: Reference) -> tuple[int, int, int]:
    """(compared, mismatching, excused) (token, layer) pairs; a pair whose margin is a near tie is excused."""
    assert batch.routes is not None
    differs, tie = (of[batch.routes.valid] for of in (_differs(batch, expected), expected.margin < NEAR_TIE))
    return differs.size, int((differs & ~tie).sum()), int((differs & tie).sum())


def _differs(batch: RolloutBatch, expected: Reference) -> np.ndarray:
    """`[N, L]`: whether other experts are recorded. Says nothing of rows without a route."""
    assert batch.routes is not None
    got = np.sort(batch.routes.experts.astype(np.int64), axis=-1)
    return (got != np.sort(expected.experts, axis=-1)).any(axis=-1)


def _behind_ties(batch: RolloutBatch, expected: Reference) -> np.ndarray:
    """`[N]`: rows that some row before them in their sequence was routed otherwise for, at a near tie."""
    if batch.routes is None:
        return np.zeros(len(batch.token_ids), dtype=bool)
    fell = (_differs(batch, expected) & (expected.margin < NEAR_TIE)).any(axis=1) & batch.routes.valid
    before = np.cumsum(fell) - fell
    return before > np.repeat(before[batch.offsets[:-1]], np.diff(batch.offsets))


def check_record(model: Path, batch: RolloutBatch, layers: int) -> None:
    """log mu, the top K and all routes of a batch are those that transformers has for the checkpoint."""
    assert batch.routes is not None
    expected = reference(load(model), batch)
    assert compare_law(batch, expected) <= 1e-4
    compared, mismatching, excused = compare_routes(batch, expected)
    assert compared == layers * batch.routes.valid.sum()
    assert mismatching == 0
    assert excused <= compared // 1000
