"""How a model is spread over ranks, and what of its activations they keep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from megatron_dppo.batch.context_parallel import sequence_multiple
from megatron_dppo.config_base import ConfigModel
from megatron_dppo.errors import UserError

if TYPE_CHECKING:
    from megatron_dppo.models.hf_config import HFConfig

Recompute = Literal["none", "activation", "selective", "full"]
"""What the backward computes again, from the fastest to the leanest."""


class ParallelConfig(ConfigModel):
    """Sizes of the parallel groups. What is left of the world is data parallelism: `world / (tensor x pipeline x
    context)` copies of the dense weights, `world / (expert_tensor x expert x pipeline)` copies of each expert."""

    tensor: int = Field(default=1, ge=1)
    """Ranks that share every dense matrix and the vocabulary (TP)."""
    pipeline: int = Field(default=1, ge=1)
    """Stages the layers are divided into (PP)."""
    virtual_pipeline: int | None = Field(default=None, ge=1)
    """Model chunks per stage (VPP, interleaved schedule); null is 1."""
    context: int = Field(default=1, ge=1)
    """Ranks that share every sequence (CP)."""
    expert: int = Field(default=1, ge=1)
    """Ranks the experts are divided among (EP)."""
    expert_tensor: int = Field(default=1, ge=1)
    """Ranks that share every expert's matrices (ETP)."""
    sequence_parallel: bool = False
    """Shard activations between the tensor-parallel regions by token; needed by mixture-of-experts models with
    tensor > 1."""
    overlap_expert_exchange: bool = False
    """Run the forward of a microbatch beside the backward of the one before, layer by layer (Megatron-Core's combined
    1F1B), so that each one's exchange of tokens between experts' ranks is hidden behind the other's computation."""

    @property
    def chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return self.virtual_pipeline or 1

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the dense weights and one sequence: TP x PP x CP."""
        return self.tensor * self.pipeline * self.context

    @property
    def fewest_ranks(self) -> int:
        """The smallest world that the layout divides."""
        return math.lcm(self.model_ranks, self.expert * self.expert_tensor * self.pipeline)

    def packed_length(self, tokens: int) -> int:
        """Rows that a sequence takes in a pack: context-parallel ranks share it in equal chunks."""
        multiple = sequence_multiple(self.context)
        return -(-tokens // multiple) * multiple

    def data(self, world_size: int) -> int:
        """Data-parallel size of `world_size` ranks."""
        return world_size // self.model_ranks

    def check_fits(self, model: HFConfig, world_size: int) -> None:
        """Raise `UserError` with the first reason why `model` cannot run like this on `world_size` ranks."""
        experts = model.moe.experts if model.moe else 0
        problems = [
            # ranks
            (
                world_size % self.model_ranks != 0,
                f"world size {world_size} is not a multiple of tensor x pipeline x context = "
                f"{self.tensor} x {self.pipeline} x {self.context} = {self.model_ranks}; change the number of ranks "
                "or these sizes",
            ),
            (
                world_size % (self.expert_tensor * self.expert * self.pipeline) != 0,
                f"world size {world_size} is not a multiple of expert_tensor x expert x pipeline = "
                f"{self.expert_tensor} x {self.expert} x {self.pipeline}; change the number of ranks or these sizes",
            ),
            # experts
            (
                not model.moe and self.expert * self.expert_tensor > 1,
                f"the model ({model.family.model_type}) has no experts; set expert and expert_tensor to 1",
            ),
            (
                bool(model.moe) and experts % self.expert != 0,
                f"{experts} experts cannot be divided among expert = {self.expert} ranks; choose a divisor",
            ),
            (
                bool(model.moe) and model.moe is not None and model.moe.intermediate_size % self.expert_tensor != 0,
                f"the experts' intermediate size {model.moe.intermediate_size if model.moe else 0} cannot be divided "
                f"by expert_tensor = {self.expert_tensor}",
            ),
            (
                model.moe is not None and model.moe.linear_bias and self.expert_tensor > 1,
                f"the experts of {model.family.model_type} carry biases, which expert_tensor = {self.expert_tensor} "
                "ranks cannot share; set it to 1",
            ),
            (
                self.overlap_expert_exchange and self.expert == 1,
                "overlap_expert_exchange needs expert > 1: with 1 no tokens are exchanged; set it to false",
            ),
            (
                self.overlap_expert_exchange and self.pipeline > 1 and self.chunks == 1,
                f"overlap_expert_exchange with pipeline = {self.pipeline} needs virtual_pipeline > 1: without it no "
                "forward is independent of the backward that it would run beside; set one of them",
            ),
            (
                self.overlap_expert_exchange and model.moe is not None and not model.moe.layers[-1],
                "overlap_expert_exchange needs experts in the last layer: Megatron-Core leaves out the final norm "
                "behind any other; set it to false",
            ),
            # attention
            (
                bool(model.windows) and self.context > 1,
                f"layers of {model.family.model_type} attend through windows, which context = {self.context} ranks "
                "cannot share; set it to 1",
            ),
            (
                model.heads % self.tensor != 0,
                f"{model.heads} attention heads cannot be divided by tensor = {self.tensor}",
            ),
            (
                model.kv_heads % self.tensor != 0 and self.tensor % model.kv_heads != 0,
                f"{model.kv_heads} key-value heads and tensor = {self.tensor}: one must divide the other",
            ),
            (
                model.delta is not None and model.delta.key_heads % (self.tensor * self.context) != 0,
                f"the delta rule's {model.delta.key_heads if model.delta else 0} key heads cannot be divided by tensor "
                f"x context = {self.tensor} x {self.context}",
            ),
            (
                model.latent is not None and any(size % self.tensor for size in model.latent.divided),
                f"latent vectors of {' and '.join(map(str, model.latent.divided if model.latent else ()))} numbers "
                f"cannot be divided by tensor = {self.tensor}",
            ),
            # dense products
            (
                model.has_dense_layers and model.intermediate_size % self.tensor != 0,
                f"the intermediate size {model.intermediate_size} cannot be divided by tensor = {self.tensor}",
            ),
            (
                model.moe is not None and model.moe.shared_size % self.tensor != 0,
                f"the shared expert's size {model.moe.shared_size if model.moe else 0} cannot be divided by tensor = "
                f"{self.tensor}",
            ),
            # stages, and rows of a sequence
            (
                model.layers < self.pipeline * self.chunks,
                f"{model.layers} layers are fewer than pipeline x virtual_pipeline = {self.pipeline} x {self.chunks}",
            ),
            (
                self.chunks > 1 and self.pipeline == 1,
                f"virtual_pipeline = {self.chunks} needs pipeline > 1",
            ),
            (
                self.sequence_parallel and self.tensor == 1,
                "sequence_parallel needs tensor > 1; set it to false",
            ),
            (
                bool(model.moe) and self.tensor > 1 and not self.sequence_parallel,
                "a mixture-of-experts model with tensor > 1 needs sequence_parallel: true",
            ),
        ]
        for wrong, why in problems:
            if wrong:
                raise UserError(f"parallel: {why}")


def uneven_layout(layers: int, stages: int, chunks: int) -> list[list[str]] | None:
    """Layers per chunk where they do not divide evenly: the first and the last chunk, which also hold the embedding
    and the output layer, count one layer more than they have, so that they are the ones that get fewer."""
    parts = stages * chunks
    if layers % parts == 0:
        return None
    counts = [(layers + 2) // parts + (i < (layers + 2) % parts) for i in range(parts)]
    counts.sort()  # the smallest shares go to the ends
    counts = [counts[0], *counts[2:], counts[1]]
    counts[0] -= 1
    counts[-1] -= 1
    chunked = [["decoder"] * n for n in counts]
    return [["embedding", *chunked[0]], *chunked[1:-1], [*chunked[-1], "loss"]]
