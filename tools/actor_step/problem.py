"""A model with random weights that do not depend on the layout, and rollouts to train it on."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from actor_step.cases import SEQUENCES_PER_PACK, TINY, TINY_OTHERWISE, TOPK, Case, Sizes
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.batch import RolloutBatch
from megatron_dppo.models.build import build_model
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.live import owned_parameters
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.router_replay.routes import Routes, route_dtype


def describe(case: Case, *, tiny: bool) -> HFConfig:
    """The model of a case."""
    config = case.config
    if tiny and case.family:
        decoder = text_fields(config)
        decoder |= {name: size for name, size in TINY_OTHERWISE.items() if decoder.get(name) is not None}
        if "mrope_section" in decoder.get("rope_parameters", {}):
            decoder["rope_parameters"] = decoder["rope_parameters"] | {"mrope_section": [1, 1, 0]}
    elif tiny:
        config |= TINY | {"num_hidden_layers": 2}
    return resolve_hf_config(config)


def build(case: Case, model: HFConfig, runtime: Runtime, dtype: torch.dtype) -> list[torch.nn.Module]:
    """This rank's chunks, filled."""
    parallel = ParallelConfig(**case.layout)
    parallel.check_fits(model, runtime.world_size)
    config = transformer_config(
        model, parallel, params_dtype=dtype, recompute=case.recompute, recompute_layers=case.recompute_layers
    )
    chunks = build_model(model, config, runtime.groups)
    fill(chunks, model, runtime)
    return list(chunks)


@torch.no_grad()
def fill(chunks: Sequence[torch.nn.Module], model: HFConfig, runtime: Runtime) -> None:
    """Every parameter from a generator seeded by its Hugging Face name: whole tensors are drawn and cut to the shard.

    Embedding rows have variance 1 and matrices 1 / fan-in, so that hidden states differ from token to token and the
    live routers load the experts evenly, as random routes do.
    """
    generator = torch.Generator(runtime.device)
    for item in owned_parameters(chunks, model, runtime.groups):
        if sum(math.prod(b - a for a, b in piece.local) for piece in item.pieces) != item.parameter.numel():
            item.parameter.zero_()  # rows of the padded vocabulary
        whole: dict[str, torch.Tensor] = {}
        for piece in item.pieces:
            if piece.hf_name not in whole:
                whole[piece.hf_name] = _draw(piece.hf_name, model.tensors[piece.hf_name], generator)
            target = item.parameter[tuple(slice(*extent) for extent in piece.local)]
            source = whole[piece.hf_name][tuple(slice(*extent) for extent in piece.source)]
            target.copy_(source.reshape(target.shape))


def _draw(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    generator.manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(shape, generator=generator, device=generator.device, dtype=torch.bfloat16)
    if len(shape) == 1:
        return values.mul_(0.1).add_(1.0)
    return values if "embed_tokens" in name else values.mul_(shape[-1] ** -0.5)


def timing_batch(case: Case, model: HFConfig, sizes: Sizes) -> RolloutBatch:
    """As many equal sequences as fill every microbatch of every data-parallel rank; one token of prompt, so that
    nothing is gained by leaving rows out of the LM head."""
    layout = ParallelConfig(**case.layout)
    sequences = layout.data(case.gpus) * case.microbatches * SEQUENCES_PER_PACK
    return rollouts(model, np.full(sequences, sizes.length), prompt=1, seed=1)


def agreement_batch(model: HFConfig, sizes: Sizes) -> RolloutBatch:
    """16 sequences of half to full length; the same for every layout."""
    lengths = np.random.default_rng(7).integers(sizes.length // 2, sizes.length + 1, size=16)
    return rollouts(model, lengths, prompt=sizes.length // 16, seed=2)


def rollouts(model: HFConfig, lengths: np.ndarray, *, prompt: int, seed: int) -> RolloutBatch:
    """Random tokens. `log mu` is spread as the random model's own log-probabilities are (standard-normal logits), the
    top-K ids are random, half of the rows hold the sampled one, and routes are random with distinct experts."""
    assert model.moe is not None
    rng = np.random.default_rng(seed)
    tokens = int(lengths.sum())
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = rng.integers(0, model.vocab_size, size=tokens)
    position = np.arange(tokens) - np.repeat(offsets[:-1], lengths)
    sampled = position >= prompt
    typical = -(math.log(model.vocab_size) + 0.5)
    mu = np.where(sampled, typical + rng.standard_normal(tokens), 0.0)
    topk = (ids[:, None] + rng.integers(1, 9, size=(tokens, 1)) * np.arange(TOPK)) % model.vocab_size
    topk[::2] = (topk[::2] + model.vocab_size // 2) % model.vocab_size
    topk_logp = (typical + 1.0 - 0.1 * np.arange(TOPK))[None].repeat(tokens, axis=0)
    holds = (topk == ids[:, None]) & sampled[:, None]
    topk_logp[holds] = np.broadcast_to(mu[:, None], holds.shape)[holds]

    experts, layers, k = model.moe.experts, sum(model.moe.layers), model.moe.topk
    first = rng.integers(0, experts, size=(tokens, layers, 1))
    step = 2 * rng.integers(0, experts // 2, size=(tokens, layers, 1)) + 1  # odd, so that a power of two is covered
    chosen = ((first + step * np.arange(k)) % experts).astype(route_dtype(experts))
    valid = np.ones(tokens, dtype=bool)
    valid[offsets[1:] - 1] = False  # an engine never runs the last token it samples
    chosen[~valid] = 0
    return RolloutBatch(
        token_ids=ids.astype(np.int32),
        offsets=offsets,
        prompt_lengths=np.full(len(lengths), prompt, dtype=np.int32),
        loss_mask=sampled,
        mu_logp=mu.astype(np.float32),
        topk_ids=np.where(sampled[:, None], topk, -1).astype(np.int32),
        topk_logp=np.where(sampled[:, None], topk_logp, -np.inf).astype(np.float32),
        routes=Routes(chosen, valid, experts),
        request_ids=tuple(f"0/{i}/0" for i in range(len(lengths))),
        finish_reasons=("length",) * len(lengths),
        weight_versions=np.zeros(tokens, dtype=np.int32),
    )


def advantages(sequences: int) -> np.ndarray:
    """+1, -0.5, +1, ...: a loss that is not a small difference of large terms."""
    return np.where(np.arange(sequences) % 2 == 0, 1.0, -0.5)
