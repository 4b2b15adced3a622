"""How many numbers adapters have, without building them."""

from __future__ import annotations

from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig, Target
from megatron_dppo.models.parallel import ParallelConfig

GROUPED_ROW_BYTES = 16
"""Rows of `A x` that are a multiple of this many bytes let all experts of a rank share one product."""


def adapter_sizes(model: HFConfig, parallel: ParallelConfig, layer: int, config: LoraConfig) -> dict[Target, int]:
    """Parameters of the adapters of decoder layer `layer` on one rank, by those of `config.targets` that it has.

    With rank r, hidden size h, query and key-value widths q and k, and f the width of the feed-forward layer; what
    `LoraAdapter` keeps whole on every rank is not divided:

        qkv           A 3 r h             B (q + 2 k) r / TP
        o             A r q / TP          B h r
        mlp           A 2 r h + r f / TP  B 2 f r / TP + h r
        experts       the same with the experts' f and ETP, times experts / EP
    """
    rank, hidden, tensor = config.rank, model.hidden_size, parallel.tensor
    query, key_value = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def feed_forward(width: int) -> int:
        return rank * (3 * hidden + 3 * width)

    found: dict[Target, int] = {}
    if "qkv" in config.targets:
        found["qkv"] = rank * (3 * hidden + (query + 2 * key_value) // tensor)
    if "o" in config.targets:
        found["o"] = rank * (query // tensor + hidden)
    if "mlp" in config.targets and not model.is_moe_layer(layer):
        found["mlp"] = feed_forward(model.intermediate_size // tensor)
    if "experts" in config.targets and model.is_moe_layer(layer):
        assert model.moe is not None
        local = model.moe.experts // parallel.expert
        found["experts"] = local * feed_forward(model.moe.intermediate_size // parallel.expert_tensor)
    return found


def active_adapter_parameters(model: HFConfig, config: LoraConfig) -> int:
    """Numbers of the whole model's adapters that one token is multiplied with: of the experts' those of its `topk`."""
    total = 0
    for layer in range(model.layers):
        sizes = adapter_sizes(model, ParallelConfig(), layer, config)
        if model.moe is not None and "experts" in sizes:
            sizes["experts"] = sizes["experts"] // model.moe.experts * model.moe.topk
        total += sum(sizes.values())
    return total


def check_targets(model: HFConfig, config: LoraConfig) -> None:
    """UserError where `config.targets` fit no layer of `model`."""
    if not active_adapter_parameters(model, config):
        raise UserError(
            f"lora.targets={list(config.targets)} name no layer of this {model.family.model_type} model; add another"
        )
