"""Settings of the training loop and of evaluation."""

from __future__ import annotations

from pydantic import Field, model_validator

from megatron_dppo.config_base import ConfigModel
from megatron_dppo.tasks.config import PromptTemplate
from megatron_dppo.tasks.data.config import DataConfig


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
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over the mini-batches of each rollout. The trust region's anchor stays that of the first pass. Metrics of
    tokens and sequences count every pass."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Save the training state every so many steps, and at the end; 0 saves none, unless the run is ended early."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept."""
    resume: bool = False
    """Continue from the newest checkpoint of `run.dir`; an error where there is none."""
    resume_changed: tuple[str, ...] = ()
    """Settings that a run may go on with though they were others when the checkpoint was saved, e.g. `[optimizer.lr]`;
    each is said in the log. Any other that decides the next step must be as it was. With another `prompts_per_step`
    questions go on at steps times that number, so that some are skipped or asked again."""
    export_hugging_face: bool = True
    """Write the trained model to `run.dir`/hf at the end."""
    profile_step: int | None = Field(default=None, ge=1)
    """Profile the training of this step: a table of time and memory by phase and by kind of work, and a Chrome trace of
    every rank in `run.dir`/profile. The step takes longer; null profiles none."""
    parity_check: bool = True
    """Before the first step, recompute the first rollout's log-probabilities with router replay on and off and log
    how far they are from the engine's (two forward passes)."""


class TrackingConfig(ConfigModel):
    """Where metrics and samples go beside `metrics.jsonl` and TensorBoard, which are always written."""

    wandb: bool = False
    """Log to Weights & Biases as well (`uv pip install wandb`; WANDB_MODE=offline keeps it here)."""
    trackio: bool = False
    """Log to a trackio dashboard as well (`uv pip install trackio`; 0.43.0 was seen working. It is not among the pinned
    packages because it wants pillow below 13 and TensorBoard wants 13)."""
    project: str = "megatron-dppo"
    """Project there; the run has the name `run.name`."""
    samples_every: int = Field(default=10, ge=0)
    """Write sample answers with their rewards, and the tokens that the trust region blocks most, of the first step and
    every so many steps; 0 never does."""
    samples: int = Field(default=4, ge=0)
    """Answers written each time, to `samples.jsonl`."""
    masked_tokens: int = Field(default=50, ge=0)
    """Tokens listed each time for either sign of the advantage, in `masked_tokens.jsonl` (Appendix E lists 50)."""


class EvaluationSetConfig(ConfigModel):
    """A file of questions that is evaluated, for example AIME 2024."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    """Under which it is logged: `eval/NAME/...`."""
    data: DataConfig
    """Its questions. They are put to the model as `task.system_prompt` and `task.chat_template` say and scored as
    `task.rewards` says (by math-verify unless `task.kind` is `data`)."""
    prompt: PromptTemplate | None = None
    """Format of the user's message, where it is not `task.prompt`: training data may hold its instructions already."""
    samples: int | None = Field(default=None, ge=1)
    """Answers per question; `evaluation.samples` when absent."""


class EvaluationConfig(ConfigModel):
    """avg@k on prompts that training never sees."""

    every: int = Field(default=10, ge=0)
    """Evaluate every so many steps, before the first and after the last; 0 never evaluates."""
    prompts: int = Field(default=64, ge=0)
    """Held-out prompts of the task; a task that holds none out is evaluated on `sets` alone."""
    samples: int = Field(default=4, ge=1)
    """n: answers per prompt. The mean accuracy is avg@n; pass@k is estimated for k = 1, 2, 4, ... up to n."""
    sets: tuple[EvaluationSetConfig, ...] = ()
    """Further questions, each set logged apart."""
    temperature: float = Field(default=1.0, ge=0.0)
    """Sampling temperature; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Nucleus of the evaluation's sampling."""

    @model_validator(mode="after")
    def _names_are_distinct(self) -> EvaluationConfig:
        names = [one.name for one in self.sets]
        if len(set(names)) < len(names):
            raise ValueError(f"evaluation.sets: two are named alike ({', '.join(names)})")
        return self
