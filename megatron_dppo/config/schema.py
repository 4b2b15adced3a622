"""The whole configuration of a run, composed of the classes that live beside the code they configure."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.config.algorithm import AlgorithmConfig
from megatron_dppo.config.trainer import EvaluationConfig, TrackingConfig, TrainerConfig
from megatron_dppo.config_base import ConfigModel
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.tasks.config import TaskConfig


class RunConfig(ConfigModel):
    """Where a run lives and what makes it repeatable."""

    dir: Path
    """Folder of the run: metrics, checkpoints, plots and the trained model. Made when absent."""
    name: str = "run"
    """Shown in titles."""
    seed: int = Field(default=0, ge=0)
    """Root of the random streams of training: sampling of each request, initialisation of random weights and adapters.
    The questions and their order follow from `task.seed` alone."""
    collective_timeout_minutes: float = Field(default=120.0, gt=0)
    """How long a rank waits for the others before it gives up; must exceed the longest rollout."""
    hang_minutes: float = Field(default=60.0, gt=0)
    """How long one phase of a step may take before its rank counts as hung: the stacks of all its threads are then
    written to `dir`/stacks, and rank 0 names the rank that the others wait for. The run goes on."""


class ModelConfig(ConfigModel):
    """The model that is trained."""

    path: Path
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
