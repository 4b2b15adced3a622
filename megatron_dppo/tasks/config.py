"""What a run is trained on."""

from __future__ import annotations

import datetime
import re
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from megatron_dppo.config_base import ConfigModel, Seed, Text
from megatron_dppo.tasks.agent import AgentConfig
from megatron_dppo.tasks.data.config import DataConfig
from megatron_dppo.tasks.environments.config import EnvironmentConfig
from megatron_dppo.tasks.rewards.config import RewardConfig
from megatron_dppo.tasks.rewards.patterns import compile_pattern

_BRACES = "write {{ and }} for braces of the text"


def _check(template: str) -> str:
    """ValueError for a string that cannot be filled, or that would be the same for every question."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"not a format string ({error}); {_BRACES}") from error
    for field in fields:
        if re.split(r"[.\[]", field)[0] not in ("question", "metadata"):
            raise ValueError(f"{{{field}}} is neither {{question}} nor {{metadata[...]}}; {_BRACES}")
    if not fields:
        raise ValueError("shows neither {question} nor {metadata[...]}, so every prompt would be the same")
    return template


PromptTemplate = Annotated[str, AfterValidator(_check)]
"""A Python format string over `question` and `metadata`."""


class TaskConfig(ConfigModel):
    """Where prompts come from, how they are put to the model, and how a response becomes an answer."""

    kind: Literal["reasoning-gym", "data", "environment", "agent"] = "reasoning-gym"
    """Family of tasks. `reasoning-gym`: a procedural dataset of that library, with its own verifier as the reward.
    `data`: the questions of `task.data`. `environment`: episodes of several turns in `task.environment`, all of a step
    turn by turn. `agent`: episodes that the harness of `task.agent` plays, each at its own pace, on the questions of
    `task.data`, in `task.environment`, or else of the reasoning-gym dataset."""
    dataset: str = "chain_sum"
    """Name of a reasoning-gym dataset; other kinds do not look at it, nor at `parameters`."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """The reasoning-gym dataset's own parameters, for example `{min_terms: 3, max_terms: 3}`; what is absent has the
    dataset's default."""
    data: DataConfig | None = None
    """Questions from files or from the Hugging Face hub, for the kinds `data` and `agent`."""
    environment: EnvironmentConfig | None = None
    """Where the policy acts, for the kinds `environment` and `agent`."""
    agent: AgentConfig | None = None
    """Who plays the episodes, for the kind `agent`."""
    seed: Seed = 0
    """Draws the questions and their order; it also decides which questions are held out, so a model that was trained
    on this task under another seed may have seen them."""
    train_size: int | None = Field(default=None, ge=1)
    """Distinct training questions. When absent 2,048, or for `data` all that are not held out."""
    repeat: dict[str, dict[Text, Annotated[int, Field(ge=1, le=1000)]]] = Field(default_factory=dict)
    """How often a training question of `task.data` comes in an epoch, by a field of its row: `{data_source: {code: 3}}`
    (into nested values by dots); once where it says nothing, and of several fields the product."""
    held_out_size: int | None = Field(default=None, ge=0)
    """Distinct questions for evaluation; none of them is ever a training question. When absent 256, or for `data` none:
    `evaluation.sets` names files of their own."""
    prompt: PromptTemplate = "{question}"
    """The user's message, a Python format string over the dataset's `question` and `metadata` (of `data`: the whole
    row); for example `{metadata[expression]}`."""
    system_prompt: str | None = None
    """A system message before the user's, in place of one that the data brings; none by default."""
    chat_template: bool = True
    """Wrap the messages by the tokenizer's chat template, with the opening of the assistant's turn. If false, the
    system prompt and the message are tokenized as plain text (for base models)."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """What else the chat template is given, for example `{enable_thinking: false}` (Qwen3). A name that the template
    does not read is refused."""
    date: datetime.date | None = None
    """Of the clock that a chat template may ask (Llama 3 shows the date). When absent the day on which the run or the
    evaluation began, also when it goes on later."""
    answer_pattern: str = r"\s*(?P<answer>\S(?:.*\S)?)\s*"
    """Regular expression that a whole response must match (`.` matches line breaks too). Its group `answer` goes to the
    verifier; a response that does not match is malformed and earns 0. By default any non-blank response is an answer;
    `.*<answer>(?P<answer>.*?)</answer>\\s*` wants tags."""
    rewards: tuple[RewardConfig, ...] = ()
    """What an answer is worth: the weighted sum is trained on, and each is logged apart. The first that is for a
    question decides what counts as correct. When absent the task's own verifier, or for `data` math-verify. Not for
    `environment`, which gives its own rewards."""
    reward_workers: int = Field(default=2, ge=1)
    """Workers that score answers for `verifier`, `math-verify` and `python` rewards, or hold the episodes of an
    environment or an agent."""
    reward_placement: Literal["local", "ray"] = "local"
    """Where those that score are: on the controller's machine, or as many on every node of the run's Ray cluster.
    `evaluate` has no Ray and scores locally."""
    reward_memory_mib: int = Field(default=4096, ge=256)
    """Address space of each process in them; an answer that needs more earns 0."""

    @field_validator("parameters")
    @classmethod
    def _not_ours(cls, parameters: dict[str, Any]) -> dict[str, Any]:
        for name in ("seed", "size"):
            if name in parameters:
                raise ValueError(f"{name!r} is not a parameter of the dataset here; set task.seed, task.train_size")
        return parameters

    @model_validator(mode="after")
    def _has_its_section(self) -> TaskConfig:
        for kind in ("data", "environment", "agent"):
            stray = getattr(self, kind) is not None and self.kind not in (kind, "agent")
            if stray or (self.kind == kind and getattr(self, kind) is None):
                raise ValueError(f"task.kind={kind} and the section task.{kind} go together; set both or neither")
        if self.kind == "agent":
            self._agent_has_a_harness()
        if self.chat_template_kwargs and not self.chat_template:
            raise ValueError("task.chat_template=false uses no chat_template_kwargs; leave them out")
        if self.repeat and self.data is None:
            raise ValueError("task.repeat looks at rows of task.data, which is not set; leave it out")
        if self.environment is not None and self.rewards:
            raise ValueError("an environment gives its own rewards; task.rewards must be empty")
        return self

    def _agent_has_a_harness(self) -> None:
        assert self.agent is not None
        own = self.agent.function is not None or bool(self.agent.command)
        if self.environment is None and not own:
            raise ValueError("task.kind=agent needs a harness; set task.agent.function or task.agent.command")
        if self.environment is not None:
            if own or self.data is not None:
                raise ValueError(
                    "task.kind=agent with task.environment plays that; leave task.agent.function, task.agent.command "
                    "and task.data out"
                )
            if self.environment.sandbox != "none":
                raise ValueError(
                    "task.kind=agent plays an environment in the harness's process, which has the run's rights; set "
                    "task.environment.sandbox=none, or task.kind=environment"
                )
        if not self.chat_template:
            raise ValueError("task.kind=agent speaks by the tokenizer's chat template; task.chat_template must be true")

    @field_validator("answer_pattern")
    @classmethod
    def _has_answer_group(cls, pattern: str) -> str:
        if "answer" not in compile_pattern(pattern).groupindex:
            raise ValueError("needs a group (?P<answer>...) around the answer")
        return pattern
