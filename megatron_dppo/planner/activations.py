"""What one decoder layer keeps for its backward, and what it needs besides while it runs.

Derived from Megatron-Core 0.19's layer with Transformer Engine 2.12's modules, bf16, packed sequences, operator by
operator. Letters: T tokens a rank attends from, S its rows of the residual stream (T / TP with sequence parallelism), R
rows that reach its experts, h hidden, q and k the query and key-value widths on this rank, f the experts' width.

    operator          kept for the backward                                       bytes
    norm + QKV        input and normalised input, 1 / rms                         4 S h + 4 S
    split, QK norm    contiguous copies of q and k, 1 / rms of every head         2 T (q + k) + 4 T heads
    rotary            nothing (its output is attention's input)
    attention         rotated q, k, contiguous v, output, log-sum-exp             2 T (2 q + 2 k) + 4 T heads
      with sinks      the same (`models/layers/sink_attention.py`)
      "selective"     recomputed from q, k and the view v, which keeps the
                      whole QKV product alive                                     2 T (2 q + k) + 2 T (q + 2 k)
    output projection nothing (its input is attention's output)
    norm              input, output (the router's input)                          4 S h + 4 S
    shared expert     as a dense MLP of its width w, but that the router's norm has put out its input; its output is
                      there until the layer returns                               2 T 2 w + 2 T w
    router            chosen ids (int64, twice), their probabilities              20 S topk
      sigmoid         the scores of all experts besides                           4 S E
    dispatch          row map int32 [S, 2 E + 1]; while the layer runs also fp32
                      probabilities and mask [S, E] (`release_dispatched`)        8 S E
                      where rows are sorted anew, these two are kept              5 S E
    experts, fc1      rows sorted by expert (with "activation" on one
                      expert-parallel rank sorted anew), their probabilities      2 R h + 4 R
    SwiGLU            both halves                                                 2 R 2 f
    fc2               its input; with "activation" it is computed again           2 R f; nothing
      its bias        nothing (each expert's rows with it, and all of them side by side, are freed at once)
    combine           nothing

Rows in the experts' order are one tensor on one rank, the input of fc1; where experts are divided, the forward holds
them as sent, as received and as sorted until the layer returns (`tests/planner/test_experts_memory.py`: one rank).

A layer that has a gated delta rule in place of attention (c: queries, keys and values, v: values, n heads of key size d
on this rank), by flash-linear-attention's kernels; not yet measured:

    input projection  as QKV, and its product, of which gates, betas and decays are used later    2 T (c + v + 2 n)
    convolution       its output (SiLU is computed again)                         2 T c
    delta rule        queries and keys of every value head, values, decays and betas, a triangle of 64 tokens
                                                                                  2 T (2 n d + v) + 16 T n + 128 T n
    norm and gate     the rule's output, gates, both in float32 once more         12 T v
    output projection its input                                                   2 T v

Latent attention (width a of queries and keys, v of values, c of the latent vectors with the rotary key) has in place of
QKV to rotary

    down projections  input, normalised input, latents, normalised latents        4 S h + 4 S c
    up projections    nothing: queries are rotated in place, the key's part is joined with that of every head
    attention         q, k, values padded to a key's width, output as wide        8 T a
                      and, where v is less than a, the output cut to v            2 T v

With LoRA (rank r, n projections in a product: 3 of QKV, 2 of gate and up, else 1) the frozen products keep no input,
but an adapter needs it for A's gradient. What a norm puts out is kept where an adapter or the router uses it. Besides:

    adapter of        kept                                                        bytes
    QKV, dense fc1    A x, gathered over the tokens; B spread to a block matrix   2 T n r + 2 n r out
    output, dense fc2 A x                                                         2 S r
    experts, fc1      scaled A x                                                  2 R n r
    experts, fc2      scaled A x                                                  2 R r

An expert's product adds the adapter's share in place, in the backward too: what the peak there has besides are the
gradients of A, of B and of A x. Of a rank that is no multiple of 8 the share is a tensor of its own, and so are its sum
with the frozen product's output and, kept, B spread to a block matrix: 2 (E / EP) n r 2 f.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from megatron_dppo.models.lora.size import joins
from megatron_dppo.planner.workload import Layout

_HALF, _FLOAT, _INT64 = 2, 4, 8
_CHUNK = 64
"""Tokens between states that a delta rule's kernel keeps."""


@dataclass(frozen=True)
class Operator:
    """Bytes of one operator. `forward` and `backward` are alive beside everything kept up to and with it."""

    name: str
    kept: int
    forward: int = 0
    backward: int = 0


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of one layer of one microbatch on one rank."""

    operators: tuple[Operator, ...]
    boundary: int
    """The layer's input, all that full recomputation keeps."""

    @property
    def kept(self) -> int:
        return sum(operator.kept for operator in self.operators)

    @property
    def kept_before_experts(self) -> int:
        """Or before a dense MLP: by attention and the router."""
        before = takewhile(lambda operator: operator.name not in ("experts, fc1", "norm and fc1"), self.operators)
        return sum(operator.kept for operator in before)

    @property
    def forward_peak(self) -> int:
        """Most bytes during the forward that a backward will follow, the kept ones included."""
        return max(self._running(lambda operator: operator.forward))

    @property
    def backward_peak(self) -> int:
        return max(self._running(lambda operator: operator.backward))

    def _running(self, extra: Callable[[Operator], int]) -> list[int]:
        running, peaks = 0, []
        for operator in self.operators:
            running += operator.kept
            peaks.append(running + extra(operator))
        return peaks


def layer_memory(layout: Layout, layer: int) -> LayerMemory:
    """Of layer number `layer` (from 0)."""
    rows = layout.rows_per_rank
    boundary = _HALF * rows * layout.model.hidden_size
    feed_forward = _experts if layout.model.is_moe_layer(layer) else _dense
    attention = _latent_attention if layout.model.latent else _attention
    mixer = _delta_rule if layout.model.is_delta_layer(layer) else attention
    return LayerMemory((*mixer(layout), *feed_forward(layout)), boundary)


def _delta_rule(layout: Layout) -> Sequence[Operator]:
    """In place of attention. Under context parallelism each rank has all tokens of a share of its heads."""
    model, parallel, delta = layout.model, layout.parallel, layout.model.delta
    assert delta is not None
    tokens, rows, hidden = layout.tokens_per_rank, layout.rows_per_rank, model.hidden_size
    residual = _HALF * rows * hidden
    gathered = _HALF * tokens * hidden if parallel.sequence_parallel else 0
    value = _HALF * tokens * delta.width // parallel.tensor
    convolved = _HALF * tokens * delta.convolved // parallel.tensor
    heads = tokens * delta.value_heads // parallel.tensor
    key = _HALF * heads * delta.key_dim
    mixed = convolved + value + 2 * _HALF * heads
    states = key * delta.value_dim // _CHUNK
    lora = layout.adapter_rank("qkv")
    normed = residual if layout.lora is None or lora else 0
    exchanged = mixed if parallel.context > 1 else 0
    return (
        Operator(
            "norm and input projection",
            residual + normed + _FLOAT * rows + mixed + _HALF * tokens * 2 * lora,
            gathered + (2 if lora else 1) * mixed + exchanged,
            residual + 2 * mixed + gathered + _HALF * tokens * hidden,
        ),
        Operator("convolution", convolved, convolved, 2 * convolved + mixed),
        Operator(
            "delta rule",
            2 * key + value + 4 * _FLOAT * heads + _HALF * heads * _CHUNK,
            2 * states + key + 3 * value,
            4 * states + 4 * key + 5 * value,
        ),
        Operator("norm and gate", 4 * value + 2 * value, 4 * value, 6 * value),
        Operator(
            "output projection",
            value + _HALF * rows * layout.adapter_rank("o"),
            _HALF * tokens * hidden + (residual if layout.adapts("o") else 0),
            residual + (gathered or residual) + value,
        ),
    )


def _attention(layout: Layout) -> Sequence[Operator]:
    model, parallel = layout.model, layout.parallel
    tokens, rows, hidden = layout.tokens_per_rank, layout.rows_per_rank, model.hidden_size
    heads = max(1, model.heads // parallel.tensor)
    kv_heads = max(1, model.kv_heads // parallel.tensor)
    q, k = (_HALF * tokens * n * model.head_dim for n in (heads, kv_heads))
    mixed = q + 2 * k
    residual = _HALF * rows * hidden
    gathered = _HALF * tokens * hidden if parallel.sequence_parallel else 0
    statistics = _FLOAT * tokens * heads
    norms = (q + k + _FLOAT * tokens * (heads + kv_heads)) if model.qk_norm != "none" else 0
    # cuDNN sums dq in float32; context parallelism exchanges keys and values around a ring, two buffers and gradients.
    attention_backward = 2 * q + 2 * k + 2 * q + statistics
    if model.sinks and heads > kv_heads:
        attention_backward += 2 * q  # FlashAttention 2 writes keys' and values' gradients of every query head
    lora = layout.adapter_rank("qkv")
    spread = _HALF * 3 * lora * (heads + 2 * kv_heads) * model.head_dim
    normed = residual if layout.lora is None or lora else 0
    ring = 0
    if parallel.context > 1:
        ring = 2 * 2 * k + 2 * 2 * 2 * k + q
    if layout.recompute == "selective":
        attention = Operator("attention", q + k + mixed + q, k, attention_backward + k + q + statistics + ring)
    else:
        attention = Operator("attention", q + k + k + q + statistics, mixed + ring, attention_backward + ring)
    return (
        Operator(
            "norm and QKV",
            residual + normed + _FLOAT * rows + _HALF * tokens * 3 * lora + spread,
            gathered + (2 if lora else 1) * mixed,
            2 * residual + mixed + gathered + _HALF * tokens * hidden,
        ),
        Operator("QK norm", norms, mixed + q + k, residual + 2 * mixed + q),
        attention,
        Operator(
            "output projection",
            _HALF * rows * layout.adapter_rank("o"),
            mixed + _HALF * tokens * hidden + (residual if layout.adapts("o") else 0),
            residual + (gathered or residual) + q,
        ),
    )


def _latent_attention(layout: Layout) -> Sequence[Operator]:
    model, parallel = layout.model, layout.parallel
    assert model.latent is not None
    tokens, rows, hidden = layout.tokens_per_rank, layout.rows_per_rank, model.hidden_size
    heads = model.heads // parallel.tensor
    residual = _HALF * rows * hidden
    gathered = _HALF * tokens * hidden if parallel.sequence_parallel else 0
    latents = _HALF * rows * sum(model.latent.divided)
    query, value = (_HALF * tokens * heads * width for width in (model.head_dim, model.value_dim))
    plain = _HALF * tokens * heads * model.latent.plain_dim
    padded = query if model.value_dim < model.head_dim else value
    cut = value if padded > value else 0
    statistics = _FLOAT * tokens * heads
    matrices = 3 if model.latent.query_rank is None else 4
    low = _HALF * tokens * layout.adapter_rank("qkv")
    adapted = layout.lora is None or layout.adapts("qkv")
    ring = 2 * (query + padded) + 2 * 2 * (query + padded) + query if parallel.context > 1 else 0
    backward = 2 * query + query + padded + 2 * query + statistics + ring
    if layout.recompute == "selective":
        core = Operator("attention", 2 * query + value + value, 2 * padded, backward + padded + statistics)
    else:
        core = Operator("attention", 2 * query + 2 * padded + cut + statistics, value + ring, backward)
    projected = query + plain + value
    return (
        Operator(
            "norm and down projections",
            (2 if adapted else 1) * residual + 2 * latents + _FLOAT * 3 * rows + matrices * low,
            gathered + latents,
            2 * residual + 2 * latents + gathered + _HALF * tokens * hidden,
        ),
        Operator("up projections, rotary", 0, projected + query + value, projected + query + value),
        core,
        Operator(
            "output projection",
            _HALF * rows * layout.adapter_rank("o"),
            _HALF * tokens * hidden + (residual if layout.adapts("o") else 0),
            residual + (gathered or residual) + value,
        ),
    )


def _experts(layout: Layout) -> Sequence[Operator]:
    model, parallel = layout.model, layout.parallel
    assert model.moe is not None
    moe, rows, hidden = model.moe, layout.rows_per_rank, model.hidden_size
    residual = _HALF * rows * hidden
    sent = _HALF * rows * moe.topk * hidden
    received = layout.expert_rows * hidden * _HALF
    divided = parallel.expert * parallel.expert_tensor > 1
    width = moe.intermediate_size // parallel.expert_tensor
    gate_up = layout.expert_rows * 2 * width * _HALF
    down = gate_up // 2
    local = moe.experts // parallel.expert
    again = layout.cheap_parts_again
    sorted_again = again and not divided
    lora = layout.adapter_rank("experts")
    adapted = layout.lora is None or lora > 0
    low = _HALF * layout.expert_rows * lora
    apart = lora > 0 and not joins(lora)
    spread = _HALF * local * 2 * lora * 2 * width if apart else 0
    factors = _HALF * local * lora * (hidden + width) + (0 if apart else low)
    row_map = _FLOAT * rows * (2 * moe.experts + 1)
    # The forward's own variables hold the chosen experts and rows as sent, as arrived and as sorted until the layer
    # returns. On one rank these rows are one tensor, that of fc1.
    unkept = 0 if adapted and not sorted_again else received
    held = unkept + (sent + received if divided else 0)
    chosen = rows * moe.experts * (_FLOAT + 1)
    held += (0 if sorted_again else chosen) + (residual if moe.shared_size else 0)
    combined = (2 if moe.shared_size else 1) * residual
    # The experts' output is there until the shared expert's is added; what was sorted anew is freed before.
    joined = max(2 * received, received + sent, sent + combined) if divided else received + combined
    scores = _FLOAT * rows * moe.experts if moe.score == "sigmoid" else 0
    sorted_by = chosen if sorted_again else 0
    resorted = received if sorted_again else 0
    return (
        Operator("norm", 2 * residual + _FLOAT * rows, residual, 3 * residual),
        *_shared(layout),
        Operator(
            "router",
            (2 * _INT64 + _FLOAT) * rows * moe.topk + scores,
            rows * moe.experts * (4 * _FLOAT),
            3 * residual + 2 * _FLOAT * rows * hidden,
        ),
        Operator("dispatch", row_map + sorted_by, held, residual + sent + (sent if divided else residual)),
        Operator(
            "experts, fc1",
            (0 if sorted_again else received if adapted else 0) + _FLOAT * layout.expert_rows + 2 * low + spread,
            held + (3 * gate_up if apart else 0),
            residual + gate_up + (2 if sorted_again else 1) * received + spread + 2 * factors,
        ),
        Operator("SwiGLU", gate_up, held, residual + down + gate_up + resorted),
        Operator(
            "experts, fc2",
            (0 if again else down if adapted else 0) + low,
            held + (3 if apart else 1) * received + (down if again or not adapted else 0),
            residual + received + resorted + max((2 if again else 1) * down + factors, down + resorted),
        ),
        Operator("combine", 0, held - resorted + joined, residual + received + (max(received, sent) if divided else 0)),
    )


def _shared(layout: Layout) -> Sequence[Operator]:
    """The expert that every token passes. Its input is the norm's output, which the router keeps."""
    assert layout.model.moe is not None
    if not layout.model.moe.shared_size:
        return ()
    first, *others = _dense(layout, layout.model.moe.shared_size)
    normed = (2 if layout.lora is None or layout.adapts("mlp") else 1) * _HALF * layout.rows_per_rank
    kept = first.kept - normed * layout.model.hidden_size - _FLOAT * layout.rows_per_rank
    return (replace(first, name="shared expert, fc1", kept=kept), *others)


def _dense(layout: Layout, size: int | None = None) -> Sequence[Operator]:
    """`size`: of the MLP, default the dense layers'."""
    model, parallel = layout.model, layout.parallel
    tokens, hidden = layout.tokens_per_rank, model.hidden_size
    residual = _HALF * layout.rows_per_rank * hidden
    gathered = _HALF * tokens * hidden if parallel.sequence_parallel else 0
    width = (size or model.intermediate_size) // parallel.tensor
    gate_up = _HALF * tokens * 2 * width
    lora = layout.adapter_rank("mlp")
    adapted = layout.lora is None or lora > 0
    spread = _HALF * 2 * lora * 2 * width
    whole = _HALF * tokens * hidden
    return (
        Operator(
            "norm and fc1",
            (2 if adapted else 1) * residual + _FLOAT * layout.rows_per_rank + _HALF * tokens * 2 * lora + spread,
            gathered + (2 * gate_up if lora else 0),
            residual + gate_up + gathered + whole,
        ),
        Operator("SwiGLU", gate_up, 0, residual + gate_up // 2 + gate_up),
        Operator(
            "fc2",
            (gate_up // 2 if adapted else 0) + _HALF * layout.rows_per_rank * lora,
            whole + (residual if lora else 0) + (0 if adapted else gate_up // 2),
            residual + whole + gate_up // 2,
        ),
    )
