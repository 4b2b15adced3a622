"""What is trained per step, and on what: the arguments of every estimate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron_dppo.models.lora.config import LoraConfig, Target
from megatron_dppo.models.parallel import ParallelConfig, Recompute
from megatron_dppo.planner.gpus import Gpu

if TYPE_CHECKING:
    from megatron_dppo.models.hf_config import HFConfig

EXPERT_IMBALANCE = 1.2
"""Rows of the fullest expert-parallel rank over the mean, where nothing else is said."""


@dataclass(frozen=True)
class Workload:
    """One rollout step: `sequences` answers, trained on `ppo_epochs` times in `mini_batches` gradient steps each."""

    sequences: int
    """Prompts x samples."""
    mini_batches: int
    """Gradient steps of one pass."""
    prompt_tokens: int
    response_tokens: int
    """Of the longest sequence; also what an engine must have room for."""
    mean_response_tokens: int
    """What an average response has: decides time and bytes per step."""
    topk: int = 20
    """K of the recorded top-K log-probabilities; 0 records the sampled token alone."""
    ppo_epochs: int = 1
    """Passes over the mini-batches (`trainer.ppo_epochs`)."""
    routes: bool = True
    """Whether the experts of every token are recorded (`rollout.router_replay`)."""

    @property
    def sequence(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt_tokens + self.response_tokens

    @property
    def mean_sequence(self) -> int:
        return self.prompt_tokens + self.mean_response_tokens

    @property
    def tokens(self) -> int:
        """Tokens of a rollout step; each pass trains on all of them."""
        return self.sequences * self.mean_sequence

    @property
    def gradient_steps(self) -> int:
        """Of all passes."""
        return self.ppo_epochs * self.mini_batches

    @property
    def trained_tokens(self) -> int:
        """Tokens of all passes."""
        return self.ppo_epochs * self.tokens


@dataclass(frozen=True)
class Layout:
    """A model spread over GPUs."""

    model: HFConfig
    gpu: Gpu
    gpus: int
    parallel: ParallelConfig
    recompute: Recompute = "none"
    recompute_layers: int | None = None
    """Of each model chunk, with full recomputation, the first; None is all."""
    microbatch_tokens: int = 16384
    """Tokens of one pack, shared by the context-parallel ranks."""
    attention_span: int = 2048
    """Tokens of the sequences in a pack, what attention looks back on."""
    expert_imbalance: float = 1.0
    """Rows of the fullest expert-parallel rank over the mean."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the weights."""
    reduced_bytes: int = 4
    """Of a number of the gradient on its way between data-parallel ranks (`optimizer.grad_reduce_dtype`)."""
    optimizer_offload: float = 0.0
    """Fraction of the trained parameters whose optimizer state lives on the host (`optimizer.cpu_offload_fraction`)."""

    def adapts(self, target: Target) -> bool:
        """Whether layers of this kind have adapters."""
        return self.lora is not None and target in self.lora.targets

    def adapter_rank(self, target: Target) -> int:
        """Their rank there, or 0."""
        return self.lora.rank if self.lora is not None and self.adapts(target) else 0

    @property
    def recomputed_layers(self) -> int:
        """Layers of each model chunk, from its first, that are recomputed; where that is more than it has, all."""
        if self.recompute != "full":
            return 0
        return self.model.layers if self.recompute_layers is None else self.recompute_layers

    @property
    def cheap_parts_again(self) -> bool:
        """Whether layers that are not recomputed make experts' sorted rows and gated SiLU again."""
        return self.recompute == "activation" or (self.recompute == "full" and self.recompute_layers is not None)

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.parallel.data(self.gpus)

    @property
    def dense_copies(self) -> int:
        """Ranks among which the optimizer state of a dense parameter is divided: data x context parallel."""
        return self.data * self.parallel.context

    @property
    def expert_copies(self) -> int:
        """The same for an expert's parameter."""
        return self.gpus // (self.parallel.expert_tensor * self.parallel.expert * self.parallel.pipeline)

    @property
    def tokens_per_rank(self) -> int:
        """Tokens a rank attends from in a microbatch (T): those of its context-parallel share."""
        return math.ceil(self.microbatch_tokens / self.parallel.context)

    @property
    def rows_per_rank(self) -> int:
        """Rows of the residual stream on a rank (S): its sequence-parallel share of T."""
        return self.tokens_per_rank // (self.parallel.tensor if self.parallel.sequence_parallel else 1)

    @property
    def expert_rows(self) -> int:
        """Rows that pass this rank's experts (R): every row of the expert-parallel group goes to `topk` experts."""
        assert self.model.moe is not None
        rows = self.rows_per_rank * self.model.moe.topk * self.parallel.expert_tensor
        return int(rows * (self.expert_imbalance if self.parallel.expert > 1 else 1.0))
