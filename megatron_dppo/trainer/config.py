"""Settings of the training loop and of evaluation."""

from __future__ import annotations

from pydantic import Field

from megatron_dppo.config.base import ConfigModel


class TrainerConfig(ConfigModel):
    """How many steps of what size, and what is kept on disk."""

    steps: int = Field(default=100, ge=1)
    """Rollout steps in all; a resumed run continues up to this number."""
    prompts_per_step: int = Field(default=256, ge=1)
    """Prompts rolled out per step."""
    samples_per_prompt: int = Field(default=16, ge=1)
    """Answers sampled per prompt; their mean reward is the baseline."""
    prompts_per_mini_batch: int = Field(default=32, ge=1)
    """Prompts per gradient step (`ppo_mini_batch_size` counts prompts); must divide `prompts_per_step`."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Save the training state every so many steps, and at the end; 0 saves none."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    resume: bool = False
    """Continue from the newest checkpoint of `run.dir`; an error where there is none."""
    export_hugging_face: bool = True
    """Write the trained model to `run.dir`/hf at the end."""
    profile_step: int | None = Field(default=None, ge=1)
    """Profile the training of this step: a table of time and memory by phase and by kind of work, and a Chrome trace of
    every rank in `run.dir`/profile. The step takes longer; null profiles none."""
    parity_check: bool = True
    """Before the first step, recompute the first rollout's log-probabilities with router replay on and off and log
    how far they are from the engine's (two forward passes)."""


class EvaluationConfig(ConfigModel):
    """avg@k on prompts that training never sees."""

    every: int = Field(default=10, ge=0)
    """Evaluate every so many steps, before the first and after the last; 0 never evaluates."""
    prompts: int = Field(default=64, ge=1)
    """Held-out prompts."""
    samples: int = Field(default=4, ge=1)
    """k: answers per prompt."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus of the evaluation's sampling."""
