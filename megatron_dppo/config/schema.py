"""The whole configuration of a run, composed of the classes that live beside the code they configure; the objective has
its own here, since `algorithm` knows no configuration."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.algorithm import (
    AdvantageEstimator,
    Baseline,
    KLEstimator,
    KLPlace,
    ReferenceKL,
    group_advantages,
    own_advantages,
    presets,
)
from megatron_dppo.algorithm.aggregation import Aggregation
from megatron_dppo.algorithm.preset import Preset
from megatron_dppo.config.trainer import EvaluationConfig, TrackingConfig, TrainerConfig
from megatron_dppo.config_base import CallablePath, ConfigModel, Folder, Seed, where_it_is
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.rollout.config import PAPERS_TOPK, RolloutConfig
from megatron_dppo.tasks.config import TaskConfig


class ReferenceKLConfig(ConfigModel):
    """A KL to the model of `model.path`, or with adapters to that model without them. See docs/algorithms.md."""

    coefficient: float = Field(ge=0)
    """Weight of the KL per token, in units of the reward (`reward`) or of the token loss (`loss`). 0 measures it and
    changes nothing else."""
    estimator: KLEstimator = KLEstimator.K3
    """k1, k2, k3 of the sampled token; topk over the rollout's K likeliest tokens. k1 in the loss has no useful
    gradient."""
    place: KLPlace = KLPlace.LOSS
    """In the loss of every trained token, or subtracted from the reward of the answer."""

    def resolve(self) -> ReferenceKL:
        return ReferenceKL(coefficient=self.coefficient, estimator=self.estimator, place=self.place)


class AlgorithmConfig(ConfigModel):
    """A row of the preset table, and any field of it overridden. See docs/algorithms.md."""

    preset: str = "dppo-binary-tv"
    """Name of the preset; it fixes the trust region and its anchor."""
    constants: str | None = None
    """Published set of constants ("appendix-d", "appendix-f", ...); the preset's first when absent."""
    overrides: dict[str, bool | int | Annotated[float, Field(allow_inf_nan=True)] | str] = Field(default_factory=dict)
    """Fields of the preset to change, e.g. `algorithm.overrides.threshold_negative=0.2`."""
    divergence: str | None = None
    """D of a preset that masks by divergence: a row of the table, or the import path (`package.module:NAME` or
    `path/to/file.py:NAME`) of one's own; the preset's when absent. It brings its thresholds and K."""
    loss: str | None = None
    """Import path of a per-token loss of one's own in place of Eq. 23's."""
    reference_kl: ReferenceKLConfig | None = None
    """Null, as in the paper, for none: no reference is kept and no pass of it run."""
    baseline: Baseline = Baseline.MEAN
    """What is subtracted from a reward: the mean of its group, of the others of its group, or nothing."""
    divide_by_std: bool = False
    """Divide advantages by the group's standard deviation (the paper does not)."""
    advantage: CallablePath | None = None
    """Import path of a function of one's own from the rewards of a step's answers, and the group of each, to their
    advantages, in place of a baseline."""
    overlong_filter: bool = False
    """Leave answers that were cut at `rollout.max_response_tokens` out of the loss, and of an environment the episodes
    that it did not end. Their rewards still count in the baseline of their group."""
    normaliser: float | None = Field(default=None, gt=0)
    """L of the aggregation `seq-mean-token-sum-norm`, in tokens; `rollout.max_response_tokens` when absent."""

    @model_validator(mode="after")
    def _has_a_use(self) -> AlgorithmConfig:
        if twice := [name for name in ("divergence", "loss") if getattr(self, name) and name in self.overrides]:
            raise ValueError(f"algorithm.{twice[0]} and algorithm.overrides.{twice[0]} are one setting; set the first")
        if self.advantage is not None and (self.baseline is not Baseline.MEAN or self.divide_by_std):
            raise ValueError(
                f"algorithm.baseline={self.baseline} and algorithm.divide_by_std={self.divide_by_std} have no effect "
                "beside algorithm.advantage; leave them out"
            )
        aggregation = self.resolve().aggregation
        if self.normaliser is not None and aggregation is not Aggregation.SEQ_MEAN_TOKEN_SUM_NORM:
            raise ValueError(
                f"algorithm.normaliser={self.normaliser:g} has no effect: the aggregation is {aggregation}, not "
                f"{Aggregation.SEQ_MEAN_TOKEN_SUM_NORM}; set it to null"
            )
        return self

    @property
    def advantages(self) -> AdvantageEstimator:
        """What makes advantages of rewards."""
        if self.advantage is not None:
            return partial(own_advantages, self.advantage)
        return partial(group_advantages, baseline=self.baseline, normalize_std=self.divide_by_std)

    def resolve(self) -> Preset:
        """The preset with the overrides applied. Raises PresetError (a ValueError) with the reason."""
        own = {name: value for name in ("divergence", "loss") if (value := getattr(self, name)) is not None}
        return presets.get(self.preset, constants=self.constants, **(self.overrides | own))


class RunConfig(ConfigModel):
    """Where a run lives and what makes it repeatable."""

    dir: Folder
    """Folder of the run: metrics, checkpoints, plots and the trained model. Made when absent."""
    name: str = "run"
    """Shown in titles."""
    seed: Seed = 0
    """Root of the random streams of training: sampling of each request, initialisation of random weights and adapters.
    The questions and their order follow from `task.seed` alone."""
    collective_timeout_minutes: float = Field(default=60.0, gt=0)
    """How long a rank waits for the others in a collective, or at the start, before it gives up and the run ends. None
    lasts as long as a rollout: rank 0 sends a word every 15 s. It must be twice `rollout.sync_timeout_s`, which is what
    engines that hang may take, and should not be below `hang_minutes`, so that a hung rank is named first."""
    hang_minutes: float = Field(default=60.0, gt=0)
    """How long one phase of a step may take before its rank counts as hung: the stacks of all its threads are then
    written to `dir`/stacks, and rank 0 names the rank that the others wait for. The run goes on."""


class ModelConfig(ConfigModel):
    """The model that is trained."""

    path: Annotated[Path, AfterValidator(where_it_is)]
    """Folder with a Hugging Face checkpoint: config.json, safetensors, tokenizer."""
    random_weights: bool = False
    """Draw the weights from `run.seed`; the folder then needs no safetensors. For trying out large shapes."""


class Config(ConfigModel):
    """A training run. Every key may be overridden on the command line as `section.key=value`. What spans sections is
    checked by `preflight`."""

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig | None = None
    """Adapters to train in place of the weights; null trains all of them."""
    parallel: ParallelConfig = ParallelConfig()
    actor: ActorConfig = ActorConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    rollout: RolloutConfig = RolloutConfig()
    task: TaskConfig = TaskConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _records_what_is_used(self) -> Config:
        """Of a rollout what the trainer reads, where the configuration does not say otherwise: it does not become a
        setting of those that are given."""
        preset, kl = self.algorithm.resolve(), self.algorithm.reference_kl
        of_kl = PAPERS_TOPK if kl is not None and kl.estimator is KLEstimator.TOPK else 0
        used = {
            "top_k_logprobs": preset.topk if preset.needs_topk else of_kl,
            "router_replay": self.actor.router_replay == "r3",
        }
        missing = {name: value for name, value in used.items() if name not in self.rollout.model_fields_set}
        rollout = self.rollout.model_copy(update=missing)
        rollout.model_fields_set.difference_update(missing)
        object.__setattr__(self, "rollout", rollout)
        return self
