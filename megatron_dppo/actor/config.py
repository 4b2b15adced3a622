"""Settings of the Megatron actor and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field, JsonValue, model_validator

from megatron_dppo.actor.packing import LongSequences
from megatron_dppo.config_base import ConfigModel
from megatron_dppo.errors import UserError
from megatron_dppo.models.parallel import Recompute

if TYPE_CHECKING:
    from megatron_dppo.actor.megatron_options import MegatronOptions

ReplayMode = Literal["none", "r2", "r3"]


class ActorConfig(ConfigModel):
    """Precision, batching and memory of the training side."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Of weights and activations; statistics of the LM head and the router are float32 always."""
    max_tokens_per_microbatch: int = Field(default=17408, ge=1)
    """Token budget of one packed microbatch. Context-parallel ranks share a pack, so each of them sees
    `max_tokens_per_microbatch / parallel.context` of it."""
    long_sequences: LongSequences = "refuse"
    """A sequence over that budget stops the run ("refuse") or gets a microbatch of its own ("alone")."""
    token_dispatcher: Literal["alltoall", "allgather"] = "alltoall"
    """How tokens reach their experts. With allgather all microbatches are padded to the longest."""
    recompute: Recompute = "none"
    """Activation recomputation: nothing, the experts' gated SiLU and, where experts are not divided among ranks, the
    rows sorted by expert ("activation", on GPUs), core attention ("selective"), or whole layers."""
    recompute_layers: int | None = Field(default=None, ge=1, strict=True)
    """With `recompute=full`: only the first so many layers of each model chunk (a pipeline stage, or its part in an
    interleaved schedule) are recomputed, the others as with "activation", or "none" where that is refused: as few as
    the memory allows take the least time (`megatron-dppo plan` finds how many). null recomputes all."""
    router_replay: ReplayMode = "r3"
    """Experts of the training forward: the engine's ("r3"), the trainer's own of the
    pass before the update ("r2", needs a preset with a recomputed anchor), or what the live router says ("none").
    Without effect on models without experts."""
    load_balancing_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of the Switch Transformer's load-balancing loss of every MoE layer; 0 is off, as in the paper."""
    router_z_loss: float = Field(default=0.0, ge=0.0)
    """Coefficient of ST-MoE's loss on the size of the router's logits; 0 is off, as in the paper."""
    router_bias_update_rate: float = Field(default=0.0, ge=0.0)
    """0 holds the correction bias of routers that have one (GLM-4.5, MiniMax-M2) constant. Above, every gradient step
    adds this to the bias of each expert that fewer tokens went to than to the average one, and takes it from the
    others', as in pretraining (DeepSeek-V3: 0.001)."""
    max_skipped_steps: int = Field(default=3, ge=0)
    """Gradient steps in a row that may be skipped because loss or gradients are not finite; one more stops the run."""
    megatron: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of Megatron-Core's configurations that have no setting here, e.g.
    `actor.megatron.attention_backend=flash`. See docs/configuration.md."""

    def megatron_options(self) -> MegatronOptions:
        """`megatron`, each option where it belongs. Raises UserError for what is not taken."""
        from megatron_dppo.actor.megatron_options import MegatronOptions, megatron_options  # loads Megatron-Core

        if not self.megatron:
            return MegatronOptions({}, {}, {})
        return megatron_options(self.megatron, recompute=self.recompute)

    @model_validator(mode="after")
    def _megatron_takes_them(self) -> ActorConfig:
        if self.megatron:
            try:
                self.megatron_options()
            except UserError as error:
                raise ValueError(str(error)) from None
        return self

    @model_validator(mode="after")
    def _layers_of_full(self) -> ActorConfig:
        if self.recompute_layers is not None and self.recompute != "full":
            raise ValueError(
                f"actor.recompute_layers={self.recompute_layers} counts layers that actor.recompute=full recomputes, "
                f"not {self.recompute}; set that, or leave out actor.recompute_layers"
            )
        return self


class OptimizerConfig(ConfigModel):
    """Adam on Megatron-Core's distributed optimizer."""

    lr: float = Field(default=1e-6, ge=0.0)
    """Peak learning rate."""
    min_lr: float = Field(default=0.0, ge=0.0)
    """Floor that a decaying schedule reaches, at most `lr`; without effect on a constant one."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After the warm-up."""
    warmup_steps: int = Field(default=0, ge=0)
    """Gradient steps of linear warm-up from 0."""
    decay_steps: int = Field(default=0, ge=0)
    """Gradient steps until `min_lr` for a decaying schedule; without effect on a constant one."""
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    epsilon: float = Field(default=1e-8, gt=0.0)
    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled (AdamW); norms and biases are not decayed."""
    clip_grad: float = Field(default=1.0, ge=0.0)
    """Global gradient norm above which gradients are scaled down; 0 switches clipping off."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """How gradients cross data-parallel ranks. With bfloat16 half the bytes go: every rank rounds its part once, and
    the parts are added in float32 (docs/benchmarks.md has the error). For ranks on several nodes; within one NVLink is
    fast enough. Over microbatches gradients are added up in float32 either way."""
    overlap_grad_reduce: bool = False
    """Reduce gradients over data-parallel ranks bucket by bucket while the last microbatch's backward runs."""
    overlap_param_gather: bool = False
    """Gather updated weights from data-parallel ranks while the next mini-batch's forward runs, in place of before it
    (after the last mini-batch of an update there is nothing to overlap with). Needs `overlap_grad_reduce`."""
    cpu_offload_fraction: float = Field(default=0.0, ge=0.0, le=1.0)
    """Fraction of the parameters whose master weights and moments live on the host for good, where AdamW updates them
    (Megatron-Core's HybridDeviceOptimizer): 12 bytes a parameter less on the GPU, and a slower step. Needs a CUDA
    device and `actor.dtype=bfloat16`. 0 keeps all on the device."""
    keep_on_gpu_gib: float = Field(default=0.0, ge=0.0)
    """Where engines take turns with the trainer on its GPUs (`rollout.enable_sleep`): GiB of optimizer state that stay
    on each of them while the engine has it, and need not go to the host and back in every step. The engine has to leave
    them room: `rollout.gpu_memory_utilization`, or `rollout.kv_cache_mib`."""
    initial_loss_scale: float = Field(default=65536.0, gt=0.0)
    """float16 only: factor of the loss in the first backward, so that small gradients do not vanish. A step whose
    gradients overflow is skipped."""
    min_loss_scale: float = Field(default=1.0, gt=0.0)
    """float16 only: floor of the loss scale; an overflow there counts as a step that is not finite."""
    loss_scale_hysteresis: int = Field(default=1, ge=1)
    """float16 only: overflows (not necessarily in a row) after which the loss scale is halved."""
    loss_scale_window: int = Field(default=1000, ge=1)
    """float16 only: steps in a row without overflow after which the loss scale is doubled."""

    def check_offload(self, dtype: str) -> None:
        """Raises UserError where `cpu_offload_fraction` is not possible with weights of `dtype`."""
        if self.cpu_offload_fraction and dtype != "bfloat16":
            named = f"optimizer.cpu_offload_fraction={self.cpu_offload_fraction:g}"
            raise UserError(
                f"{named} needs actor.dtype=bfloat16, not {dtype}, as its HybridDeviceOptimizer looks for a "
                "master weight beside every weight; set it to 0 or change the dtype"
            )

    @model_validator(mode="after")
    def _overlaps_fit(self) -> OptimizerConfig:
        if self.overlap_param_gather and not self.overlap_grad_reduce:
            raise ValueError("optimizer.overlap_param_gather=true needs optimizer.overlap_grad_reduce=true; set both")
        return self

    @model_validator(mode="after")
    def _loss_scale_has_room(self) -> OptimizerConfig:
        if self.min_loss_scale > self.initial_loss_scale:
            raise ValueError(
                f"optimizer.min_loss_scale={self.min_loss_scale} exceeds "
                f"optimizer.initial_loss_scale={self.initial_loss_scale}; lower it"
            )
        return self

    @model_validator(mode="after")
    def _decay_is_complete(self) -> OptimizerConfig:
        if self.schedule != "constant" and self.min_lr > self.lr:
            raise ValueError(f"optimizer.min_lr={self.min_lr:g} exceeds optimizer.lr={self.lr:g}; lower it")
        if self.schedule != "constant" and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"optimizer.decay_steps={self.decay_steps} must exceed optimizer.warmup_steps={self.warmup_steps} "
                f"for optimizer.schedule={self.schedule}"
            )
        return self
