"""What is measured: layouts of one model, and how a batch of it looks."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.paper.make_shapes import SHAPES
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.parallel import Recompute
from tests.models.public_configs import CONFIGS

QWEN3_30B_A3B: dict[str, Any] = SHAPES | {"max_position_embeddings": 40960}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
}
TINY_OTHERWISE = TINY | {
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "rotary_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "shared_expert_intermediate_size": 32,
}
"""The same architectures for a CPU, in seconds."""

TOPK = 20
LEARNING_RATE = 1e-6
SEQUENCES_PER_PACK = 8
REPEATS = 4
"""Forwards and backwards of a layer of experts that are timed as one."""


def cut(name: str, moe_layers: int) -> dict[str, Any]:
    """A family's published configuration with one of its dense layers, if any, and so many of experts, and none that
    predict further."""
    whole = CONFIGS[name]
    config = text_fields(whole)
    further: dict[str, Any] = {f: 0 for f in ("num_nextn_predict_layers", "num_mtp_modules") if f in config}
    dense = min(1, config.get("first_k_dense_replace", 0))
    further |= {"first_k_dense_replace": dense} if dense else {}
    layers = dense + moe_layers
    if "full_attention_interval" in config or "layer_types" in config:
        every = config.get("full_attention_interval", layers + 1)
        kinds = ["full_attention" if layer % every == every - 1 else "linear_attention" for layer in range(layers)]
        kinds = list(config.get("layer_types", kinds))[:layers]
        if "linear_attention" in kinds and "full_attention" not in kinds and layers > 1:
            kinds[-1] = "full_attention"  # both kinds, however few the layers
        further |= {"layer_types": kinds}
    decoder = config | further | {"num_hidden_layers": layers}
    return decoder if config is whole else whole | {"text_config": decoder}


@dataclass(frozen=True)
class Sizes:
    """Tokens of a sequence (a pack holds eight), and what a microbatch of the agreement batch may hold."""

    length: int
    agreement_budget: int

    @property
    def pack(self) -> int:
        return SEQUENCES_PER_PACK * self.length


SMALL = Sizes(32, 128)
"""For a CPU."""


@dataclass(frozen=True)
class Case:
    """One run: `gpus` processes, one model.

    time       median step of several ways to train (`actor_step.arms`)
    depth      the step with this project's kernels and with stock ones (or with the exchange between experts' ranks
               overlapped and not) in turn, at one of several depths, from which the whole model's is computed
    agreement  loss and gradient norm of three steps on a batch that is the same for every layout
    experts    one layer of experts, by this project's kernels and by stock ones in turn
    """

    name: str
    gpus: int
    layers: int
    layout: dict[str, Any] = field(default_factory=dict)
    measure: Literal["time", "depth", "agreement", "experts"] = "time"
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    microbatches: int = 2
    cross_entropy: bool = True
    """Also plain cross-entropy training through Megatron-Core's own loss."""
    wgrad_arm: bool = False
    """Also without adding weight gradients to the float32 buffer inside the matrix product."""
    optimizer_arm: bool = False
    """Also with Megatron-Core's optimizer step, parameter by parameter."""
    most_rounds: int = 9
    """Turns that each way to train gets at most, time permitting."""
    trace: bool = False
    """Keep the Chrome trace of the profiled step."""
    offload: bool = False
    """Also move everything to host memory and back."""
    budget_divisor: int = 1
    length: int = 2048
    """Tokens of a sequence; a pack holds eight."""
    shapes: dict[str, Any] = field(default_factory=dict)
    """What differs from Qwen3-30B-A3B's config."""
    family: str = ""
    """A model of `tests/models/public_configs.py` in its place (`cut`); `layers` are those with experts."""
    replay_rounds: int = 0
    """Also this many turns of a step with and one without replay, next to each other."""
    predicted: bool = False
    """Only to hold the planner's step time against, committed before the case was measured: one arm, no profile."""

    recompute_logp: bool = False
    """Also steps that first recompute the log-probabilities that the trust region is around."""

    overlap: bool = False
    """Reduce gradients and gather weights beside other work."""
    whole: int = 48
    """Layers of the whole model, for `depth`."""

    @property
    def config(self) -> dict[str, Any]:
        """The model's Hugging Face config."""
        if self.family:
            return cut(self.family, self.layers)
        return QWEN3_30B_A3B | self.shapes | {"num_hidden_layers": self.layers}

    @property
    def kinds(self) -> dict[str, int]:
        """How many layers with experts there are of each kind."""
        return Counter(text_fields(self.config).get("layer_types", ["layer"] * self.layers)[-self.layers :])

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.length, 4 * self.length)

    @property
    def layout_text(self) -> str:
        short = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP"}
        parts = [f"{short[k]}{v}" for k, v in self.layout.items() if k in short]
        model = self.layout.get("tensor", 1) * self.layout.get("pipeline", 1) * self.layout.get("context", 1)
        return " ".join([*parts, *([f"DP{self.gpus // model}"] if self.gpus > model else [])]) or "1 GPU"


_TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}
_TP2_EP4 = {"tensor": 2, "expert": 4, "sequence_parallel": True}
_CP2_EP2 = {"context": 2, "expert": 2}
_PP2_EP2 = {"pipeline": 2, "expert": 2}
_QWEN3_235B_A22B = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
}


def _depths(name: str, gpus: int, layers: tuple[int, ...], **options: Any) -> list[Case]:
    return [Case(f"{name}-{n}", gpus, n, measure="depth", most_rounds=20, **options) for n in layers]


CASES = [
    Case("b2", 2, 8, _TP2_EP2, recompute="selective", wgrad_arm=True, trace=True),
    Case("a1", 1, 4, cross_entropy=False, optimizer_arm=True, recompute_logp=True, most_rounds=40, trace=True),
    Case("a1-activation", 1, 4, recompute="activation", cross_entropy=False, predicted=True),
    Case("a1-wgrad", 1, 4, cross_entropy=False, wgrad_arm=True),
    Case("a1-small", 1, 2, offload=True),
    Case("a1-replay", 1, 4, cross_entropy=False, replay_rounds=80),
    Case("a1-short", 1, 4, cross_entropy=False, length=512),
    Case("a1-long", 1, 2, cross_entropy=False, length=4096, microbatches=1),
    Case("p1", 1, 8, cross_entropy=False, predicted=True),
    Case("p2", 1, 6, recompute="full", cross_entropy=False, predicted=True),
    Case("p3", 1, 4, cross_entropy=False, length=1024, microbatches=4, predicted=True),
    Case("p4", 1, 3, cross_entropy=False, length=4096, microbatches=2, predicted=True),
    Case("p5", 1, 5, recompute="selective", cross_entropy=False, microbatches=3, predicted=True),
    Case("p6", 1, 4, recompute="full", cross_entropy=False, length=512, microbatches=8, predicted=True),
    Case("p7", 1, 1, cross_entropy=False, shapes=_QWEN3_235B_A22B, predicted=True),
    Case("p8", 1, 4, cross_entropy=False, shapes={"num_experts": 32}, predicted=True),
    Case("r1", 1, 7, cross_entropy=False, predicted=True),
    Case("r2", 1, 5, recompute="full", cross_entropy=False, length=1024, microbatches=4, predicted=True),
    Case("r3", 1, 3, cross_entropy=False, microbatches=3, predicted=True),
    Case("r4", 1, 6, recompute="selective", cross_entropy=False, length=4096, microbatches=1, predicted=True),
    Case("r5", 1, 2, cross_entropy=False, shapes=_QWEN3_235B_A22B, predicted=True),
    Case("same-1", 1, 4, measure="agreement"),
    Case("same-1-small-packs", 1, 4, measure="agreement", budget_divisor=2),
    Case("c2", 2, 6, {"expert": 2}, recompute="full"),
    Case("d2", 2, 6, _CP2_EP2, recompute="full", cross_entropy=False),
    Case("q1", 2, 6, _TP2_EP2, cross_entropy=False, predicted=True),
    Case("q2", 2, 5, {"expert": 2}, cross_entropy=False, predicted=True),
    Case("cp2", 2, 4, {"context": 2}, cross_entropy=False, predicted=True),
    Case("same-cp2", 2, 4, {"context": 2}, measure="agreement"),
    Case("same-tp2-ep2", 2, 4, _TP2_EP2, measure="agreement"),
    Case("same-cp2-ep2", 2, 4, _CP2_EP2, measure="agreement"),
    Case("f4", 4, 12, {"expert": 4}, recompute="full"),
    Case("e4", 4, 12, _PP2_EP2, recompute="full", microbatches=4),
    Case("same-ep4", 4, 4, {"expert": 4}, measure="agreement"),
    Case("same-pp2-ep2", 4, 4, _PP2_EP2, measure="agreement"),
    Case("g4", 4, 12, _TP2_EP4, recompute="full", cross_entropy=False),
    Case("experts", 1, 1, measure="experts", most_rounds=40),
    Case("experts-235b", 1, 1, measure="experts", most_rounds=40, shapes=_QWEN3_235B_A22B),
    *_depths("full-1", 1, (2, 4)),
    *_depths("full-1-235b", 1, (1, 2), shapes=_QWEN3_235B_A22B, whole=94),
    *_depths("full-1-glm", 1, (1, 2), family="GLM-4.5-Air", whole=45),
    *_depths("full-1-moonlight", 1, (2, 4), family="Moonlight-16B-A3B", whole=26),
    *_depths("full-1-flash", 1, (2, 4), family="GLM-4.7-Flash", whole=46),
    *_depths("full-1-oss", 1, (2, 4), family="gpt-oss-20b", whole=24),
    *_depths("full-1-next", 1, (1, 2, 3), family="Qwen3-Next-80B-A3B", whole=48),
    *_depths("full-1-qwen3.5", 1, (1, 2, 3), family="Qwen3.5-35B-A3B", whole=40),
    *_depths("full-ep2-minimax", 2, (1, 2), family="MiniMax-M2", layout={"expert": 2}, whole=62),
    *_depths("full-ep2", 2, (2, 4), layout={"expert": 2}),
    *_depths("full-ep2-overlap", 2, (2, 4), layout={"expert": 2}, overlap=True),
    *_depths("full-ep2-1f1b", 2, (2, 4), layout={"expert": 2, "overlap_expert_exchange": True}),
    *_depths("full-ep2-1f1b-many", 2, (2, 4), layout={"expert": 2, "overlap_expert_exchange": True}, microbatches=6),
    *_depths("full-tp2-ep2", 2, (2, 4), layout=_TP2_EP2),
    *_depths("full-pp2-ep2", 4, (4, 8), layout=_PP2_EP2, microbatches=4),
    *_depths("full-ep4", 4, (2, 4), layout={"expert": 4}),
    *_depths("full-tp2-ep4", 4, (2, 4), layout=_TP2_EP4),
    *_depths("full-tp2-ep2-dp2", 4, (2, 4), layout=_TP2_EP2),
    *_depths("full-cp2-ep2", 4, (2, 4), layout=_CP2_EP2),
    Case("whole-ep8", 8, 48, {"expert": 8}, recompute="selective", microbatches=1, cross_entropy=False, predicted=True),
]
REFERENCE = "same-1"
