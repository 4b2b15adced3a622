"""Who plays the episodes of `task.kind: agent`, and within which limits."""

from __future__ import annotations

import shlex
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from megatron_dppo.config_base import Bounds, CallablePath, ConfigModel, VariableName


class AgentConfig(ConfigModel):
    """A harness, which is a program of yours (or of others) that asks the policy by OpenAI's chat completions, as often
    as it likes and with tools of its own, and says in the end what the episode was worth. docs/agents.md has what it
    must and must not do.

    Every episode is a process of its own with a session of its own, many at the same time. A conversation may have
    `rollout.max_prompt_tokens` + `rollout.max_response_tokens` tokens, each turn `rollout.max_response_tokens`.
    """

    function: CallablePath | None = None
    """`package.module:name` or `file.py:name` of an `async def episode(client, row)`: `client` is an
    `openai.AsyncOpenAI`, `row` the question. It returns the reward, or the answer that the task's rewards are to score
    (a string), or a report (a dictionary)."""
    command: tuple[str, ...] = ()
    """A program and its arguments, as a list or as a shell would read it (no shell is used). It finds `OPENAI_BASE_URL`
    and `OPENAI_API_KEY` in its environment, the question as JSON in the file `AGENT_ROW`, and writes its report as JSON
    to the file `AGENT_REPORT`, or sends it to `$OPENAI_BASE_URL/reward`."""
    timeout_s: float = Field(default=600.0, gt=0)
    """After this an episode is over: its processes are killed, it keeps the turns that it has, and is counted
    (`reward/timeouts/agent`)."""
    max_turns: int = Field(default=64, ge=1)
    """Answers of the policy, after which an episode gets no more."""
    at_once: int = Field(default=256, ge=1)
    """Episodes under way at the same time. More than the engines decode together (`rollout.max_num_seqs` each) keeps
    them busy while others wait for their tools."""
    memory_mib: int | None = Field(default=None, ge=256)
    """Address space of each process of an episode. No limit by default: Node and Java reserve more than they use."""
    environment: tuple[VariableName, ...] = ()
    """Names of environment variables that episodes see besides those that programs need to run. Keys and tokens of the
    run are not among those."""
    bounds: Bounds = (-100.0, 100.0)
    """Least and greatest reward of an episode, and of a turn."""
    credit: Literal["episode", "turn"] = "episode"
    """What a token is trained with. `episode`: the reward of its whole episode. `turn`: what was earned from its turn
    on, against what the group's other episodes earned from the turn of the same number on."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """With `credit: turn`: a reward so many turns later counts as many times this factor."""

    edited: Literal["branch", "refuse"] = "branch"
    """What a request gets whose messages are not those of the session with new ones at the end: an answer in a branch,
    which is a sequence of its own in training, or a refusal."""
    other_sampling: Literal["refuse", "not_trained"] = "refuse"
    """What a request gets that asks for another temperature than `rollout.temperature`, or for top-p and the like: a
    refusal, or an answer that is not trained on."""
    tool_format: Literal["auto", "none", "glm", "qwen_xml", "hermes", "deepseek", "kimi", "harmony", "llama"] = "auto"
    """How the model writes calls of tools, by name; `auto` goes by its chat template."""

    @field_validator("command", mode="before")
    @classmethod
    def _split(cls, command: Any) -> Any:
        return tuple(shlex.split(command)) if isinstance(command, str) else command

    @model_validator(mode="after")
    def _consistent(self) -> AgentConfig:
        if self.function is not None and self.command:
            raise ValueError("task.agent.function and task.agent.command are two ways in; set one of them")
        if self.discount < 1 and self.credit == "episode":
            raise ValueError(
                f"task.agent.discount={self.discount:g} weighs the turns of an episode apart, which "
                "task.agent.credit=episode does not; set task.agent.credit=turn"
            )
        return self
