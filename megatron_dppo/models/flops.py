"""Floating-point operations that training a model takes, for utilisation figures."""

from __future__ import annotations

import numpy as np

from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.size import active_adapter_parameters

H100_BF16_DENSE = 989.4e12
"""Peak bfloat16 FLOP/s of one H100 SXM without sparsity (NVIDIA's data sheet)."""

_BF16_DENSE = {"H100 80GB HBM3": H100_BF16_DENSE, "H200": H100_BF16_DENSE, "A100": 312e12}


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 (and float16) FLOP/s of a GPU by a part of its name in CUDA; None for others."""
    return next((peak for part, peak in _BF16_DENSE.items() if part in device_name), None)


def training_flops(model: HFConfig, lengths: np.ndarray, lora: LoraConfig | None = None) -> float:
    """Forward and backward over whole sequences of `lengths` tokens, one entry for every pass over a sequence:

        6 x active parameters x tokens  +  12 x heads x head_dim x pairs of tokens, over layers
            + 18 x delta layers x value heads x key_dim x value_dim x tokens

    and with adapters of rank r in place of the weights (`lora`)

        (4 x active parameters + 6 x active adapter parameters) x tokens  +  the same

    A product with an `[m, n]` weight takes `2 m n` per token forward, and in the backward `2 m n` for the gradient of
    its input and `2 m n` for its own, which a frozen weight has none of: the head, the router and the base weights do
    without it, A and B do not. Attention's two products (scores, values) take `2 x 2 heads head_dim` forward for each
    pair of tokens of which one attends to the other, `n^2 / 2` in a causal sequence of `n` and `w (n - w / 2)` where
    it is longer than a layer's window `w`, and twice that backward; they have no weights. (Where values have heads of
    another size than queries and keys, `head_dim` is the mean of both.) In the layers without attention a gated delta
    rule has three products of a head's state a token (what it holds of the key, the outer product that is added,
    what the query reads), however a kernel groups them.

    Counted is what the mathematics needs, not what is executed: neither what recomputation repeats, nor the zeros of
    the block matrix that B is spread to where projections share a product, nor a forward that only recomputes an
    anchor. The gradient of the first layer's input counts, with frozen weights too.
    """
    n = np.asarray(lengths, dtype=np.float64)
    width = (model.head_dim + model.value_dim) / 2
    attending = (layer for layer in range(model.layers) if not model.is_delta_layer(layer))
    attention = 12.0 * model.heads * width * sum(float(model.pairs(layer, n).sum()) for layer in attending)
    per_token = 6.0 * model.active_parameters
    if lora is not None:
        per_token = 4.0 * model.active_parameters + 6.0 * active_adapter_parameters(model, lora)
    if delta := model.delta:
        per_token += 18.0 * sum(delta.layers) * delta.width * delta.key_dim
    return per_token * float(n.sum()) + attention
