"""How many numbers adapters have, without building them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig, Target
from megatron_dppo.models.names import Columns, is_expert
from megatron_dppo.models.parallel import ParallelConfig

GROUPED_ROW_BYTES = 16
"""Rows of `A x` that are a multiple of this many bytes let all experts of a rank share one product."""


def joins(rank: int) -> bool:
    """Whether adapters of this rank, in bfloat16, are part of their experts' product (`AdaptedGroupedLinear`)."""
    return 2 * rank % GROUPED_ROW_BYTES == 0


PARAMETERS: dict[Target, re.Pattern[str]] = {
    "qkv": re.compile(r".+\.self_attention\.(linear_qkv|linear_(q|kv)(_down|_up)?_proj|in_proj)\.weight"),
    "o": re.compile(r".+\.self_attention\.(linear_proj|out_proj)\.weight"),
    "mlp": re.compile(r".+\.mlp\.(shared_experts\.)?linear_fc[12]\.weight"),
    "experts": re.compile(r".+\.mlp\.experts\.[^.]+\.linear_fc[12]\.weight"),
}
"""Names, in a table, of the weights of each target."""


@dataclass(frozen=True)
class AdapterSize:
    """The adapters of one weight of a decoder layer on one rank (or of that weight of each of its experts)."""

    target: Target
    kinds: int
    """Projections that the weight stacks; each has an A and a B of its own."""
    rows: int
    cols: int
    """Of the weight on this rank."""
    input_sharded: bool
    """Ranks divide the columns; otherwise the rows."""
    experts: int
    """Experts on this rank; 0 for a dense weight."""

    def parameters(self, rank: int) -> int:
        """Of each A `[rank, cols]` and all B `[rows, rank]`. What `LoraAdapter` keeps whole is not divided."""
        return rank * (self.kinds * self.cols + self.rows) * max(1, self.experts)


def adapter_sizes(model: HFConfig, parallel: ParallelConfig, layer: int, config: LoraConfig) -> Iterator[AdapterSize]:
    """Every weight of decoder layer `layer` that gets adapters, in the model's order."""
    for name, transform in model.layer_tables[layer].items():
        for target in config.targets:
            if PARAMETERS[target].fullmatch(name):
                expert = model.moe is not None and is_expert(name)
                rows, cols = transform.shape(model, parallel.expert_tensor if expert else parallel.tensor)
                experts = model.moe.experts // parallel.expert if model.moe is not None and expert else 0
                kinds = len(transform.sources(model))
                yield AdapterSize(target, kinds, rows, cols, isinstance(transform, Columns), experts)


def active_adapter_parameters(model: HFConfig, config: LoraConfig) -> int:
    """Numbers of the whole model's adapters that one token is multiplied with: of the experts' those of its `topk`."""
    total = 0
    for layer in range(model.layers):
        for size in adapter_sizes(model, ParallelConfig(), layer, config):
            total += replace(size, experts=model.moe.topk if model.moe and size.experts else 0).parameters(config.rank)
    return total


def check_targets(model: HFConfig, config: LoraConfig) -> None:
    """UserError where `config.targets` fit no layer of `model`, or some that get no adapters."""
    if model.moe and model.moe.linear_bias and "experts" in config.targets:
        raise UserError(
            f"lora.targets={list(config.targets)}: the experts of {model.family.model_type} carry biases, and such get "
            "no adapters; leave out experts"
        )
    if not active_adapter_parameters(model, config):
        raise UserError(
            f"lora.targets={list(config.targets)} name no layer of this {model.family.model_type} model; add another"
        )
