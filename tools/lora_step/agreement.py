"""Adapters on this machine's layers against the dense model they are merged into."""

from __future__ import annotations

import gc
import zlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from actor_step.problem import advantages, rollouts

from lora_step.trials import Trial
from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
from megatron_dppo.batch import InMemorySource
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.lora.adapter import LoraAdapter
from megatron_dppo.models.lora.attach import adapters
from megatron_dppo.models.lora.config import LoraConfig

LIMITS = {torch.bfloat16: (0.1, 0.1), torch.float32: (1e-5, 1e-4)}
"""Mean |difference| of log-probabilities in nats, and worst relative error of an adapter parameter's gradient. Both
models compute in this precision, and the merged one rounds its weights once more."""
GROUPED_LIMIT = {torch.bfloat16: 0.02, torch.float32: 1e-5}
"""Relative error of the grouped product in such numbers against float64 of the same ones."""


def agreement(trial: Trial, lora: LoraConfig) -> dict[str, Any]:
    """Log-probabilities and gradients of random adapters against the merged dense model, recorded routes replayed.

    With `G` the dense model's gradient of a weight, the adapter's are `scale G A^T` and `scale B^T G`. Also: with B
    zero the log-probabilities are the base model's to the bit, a step leaves the base weights alone, an export gives
    the same bits each time, and the grouped product is right beside a loop in float64.
    """
    lengths = np.random.default_rng(7).integers(trial.sizes.length // 4, trial.sizes.length // 2 + 1, size=16)
    batch = rollouts(trial.model, lengths, prompt=trial.sizes.length // 16, seed=2)
    source = InMemorySource.of(batch)
    signal = TrainingSignal(advantages(16), advantages(16), [np.arange(16)])
    found: dict[str, Any] = {}

    base = _log_probs(trial.actor(trial.chunks(None), None, "cispo"), source)
    _free()

    actor = trial.actor(trial.chunks(lora), lora, "cispo")
    found["equal_at_step_0"] = bool(np.array_equal(_log_probs(actor, source), base))
    with torch.no_grad():
        for adapter in adapters(actor.model):
            adapter.b.normal_(0, 0.3 * adapter.rank**-0.5)
    adapted = _log_probs(actor, source)
    merged = {name: tensor.cpu() for name, tensor in actor.export_weights() if tensor is not None}
    frozen = [p for chunk in actor.model for p in chunk.parameters() if not p.requires_grad]
    before = _checksums(frozen)
    again = {name: _checksum(tensor) for name, tensor in actor.export_weights() if tensor is not None}
    found["exports_equal"] = again == {name: _checksum(tensor) for name, tensor in merged.items()}
    found["grouped"] = [_grouped(a) for a in adapters(actor.model) if len(a.local) > 1][:2]
    found["layer_types"] = sorted({type(_owner(actor, a)).__name__ for a in adapters(actor.model)})
    factors = [(_copy(a), _names(a)) for a in adapters(actor.model)]
    gradients = _gradients(actor, source, signal, [(a.a, a.b) for a in adapters(actor.model)])
    found["base_unchanged"] = _checksums(frozen) == before
    del actor, frozen
    _free()

    chunks = trial.chunks(None)
    with torch.no_grad():
        for owned in owned_parameters(chunks, trial.model, trial.runtime.groups):
            for piece in owned.pieces:
                block = merged[piece.hf_name][tuple(slice(*span) for span in piece.source)]
                owned.parameter[tuple(slice(*span) for span in piece.local)] = block.to(owned.parameter.device)
    dense = trial.actor(chunks, None, "cispo")
    found["logp_effect"] = float(np.abs(adapted - base).mean())
    found["logp_difference"] = float(np.abs(adapted - _log_probs(dense, source)).mean())
    weights = {o.name: o for o in owned_parameters(dense.model, trial.model, trial.runtime.groups)}
    wanted = [[weights[name].parameter for name in names] for _, names in factors]
    dense_gradients = _gradients(dense, source, signal, wanted)
    errors: dict[str, float] = {}
    for (copy, names), (da, db), whole in zip(factors, gradients, dense_gradients, strict=True):
        a, b, belongs = copy
        for factor, mine, right in (
            ("A", da, torch.stack([_a(g, a[i], b[i], belongs, lora) for i, g in enumerate(whole)])),
            ("B", db, torch.stack([_b(g, a[i], belongs, lora).view(b[i].shape) for i, g in enumerate(whole)])),
        ):
            kind = f"{'experts.' if '.experts.' in names[0] else ''}{names[0].split('.')[-2]} {factor}"
            errors[kind] = max(errors.get(kind, 0.0), _relative(mine, right))
    found["gradient_errors"] = errors
    logp_limit, gradient_limit = LIMITS[trial.dtype]
    grouped_limit = GROUPED_LIMIT[trial.dtype]
    found["agrees"] = (
        found["equal_at_step_0"]
        and found["exports_equal"]
        and found["base_unchanged"]
        and found["logp_difference"] < min(logp_limit, found["logp_effect"] / 2)
        and max(errors.values()) < gradient_limit
        and all(max(errors_.values()) < grouped_limit for errors_ in found["grouped"])
    )
    found["summary"] = f"agrees: {found['agrees']}"
    return found


def _log_probs(actor: MegatronActor, source: InMemorySource) -> np.ndarray:
    return actor.parity(source, replay=True, keep=1 << 20).tokens[:, 1].astype(np.float64)


def _gradients(
    actor: MegatronActor, source: InMemorySource, signal: TrainingSignal, parameters: list[Any]
) -> list[list[torch.Tensor]]:
    """The reduced gradients of groups of parameters in one step, before clipping."""
    kept: list[list[torch.Tensor]] = []
    prepare = actor.optimizer.prepare_grads

    def recording() -> Any:
        kept.extend([p.main_grad.float().clone() for p in group] for group in parameters)
        return prepare()

    actor.optimizer.prepare_grads = recording
    actor.update(source, signal)
    return kept


def _copy(adapter: LoraAdapter) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return adapter.a.detach().float().clone(), adapter.b.detach().float().clone(), adapter._belongs.float()


def _names(adapter: LoraAdapter) -> list[str]:
    return [one.site.name for one in adapter.local]


def _owner(actor: MegatronActor, adapter: LoraAdapter) -> torch.nn.Module:
    return next(m for chunk in actor.model for m in chunk.modules() if getattr(m, "lora", None) is adapter)


def _b(g: torch.Tensor, a: torch.Tensor, belongs: torch.Tensor, lora: LoraConfig) -> torch.Tensor:
    """`scale G A^T`, each row with the A of its projection: `[out, r]`."""
    per_kind = (g @ a.t()).view(g.shape[0], belongs.shape[1], lora.rank)
    return lora.scale * (per_kind * belongs[:, :, None]).sum(1)


def _a(g: torch.Tensor, a: torch.Tensor, b: torch.Tensor, belongs: torch.Tensor, lora: LoraConfig) -> torch.Tensor:
    """`scale B^T G` of each projection, stacked: `[n r, in]`."""
    rows = b.flatten(0, 1)
    return torch.cat([lora.scale * (rows * belongs[:, kind, None]).t() @ g for kind in range(belongs.shape[1])])


def _grouped(adapter: LoraAdapter) -> dict[str, float]:
    """Relative errors of the grouped product and its gradients against a loop over experts in float64."""
    device, experts = adapter.a.device, len(adapter.local)
    splits = np.random.default_rng(1).integers(0, 200, size=experts).tolist()
    splits[0] = splits[-1] = 0
    rows, cols = adapter.b.shape[1] * adapter.b.shape[2], adapter.a.shape[2]
    generator = torch.Generator(device).manual_seed(1)
    made = [
        torch.randn(sum(splits), n, device=device, generator=generator, dtype=adapter.a.dtype)
        for n in (cols, rows, rows)
    ]
    x, output, upstream = made
    x.requires_grad_()
    output.requires_grad_()
    y = adapter.add_to_grouped(output, x, splits)
    got = torch.autograd.grad(y, [x, output, adapter.a, adapter.b], upstream)

    exact = [t.detach().double().requires_grad_() for t in (x, output, adapter.a, adapter.b)]
    x_, output_, a_, b_ = exact
    parts = []
    for i, (piece, y_) in enumerate(zip(x_.split(splits), output_.split(splits), strict=True)):
        hidden = F.linear(piece, a_[i]).view(len(piece), len(a_[i]) // adapter.rank, adapter.rank)
        mine = torch.einsum("tkr,ok,or->to", hidden, adapter._belongs.double(), b_[i].flatten(0, 1))
        parts.append(y_ + adapter.scale * mine)
    whole = torch.cat(parts)
    right = torch.autograd.grad(whole, exact, upstream.double())
    pairs = zip(["y", "x", "output", "a", "b"], (y, *got), (whole, *right), strict=True)
    return {name: _relative(mine, exact_) for name, mine, exact_ in pairs}


def _relative(got: torch.Tensor, right: torch.Tensor) -> float:
    return float((got.double() - right.double()).norm() / right.double().norm())


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy())


def _checksums(tensors: list[torch.Tensor]) -> list[int]:
    """Sums of bits, made where the tensors are."""
    return [int(t.detach().reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for t in tensors]


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
