"""Which environment a policy acts in."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from megatron_dppo.config_base import Bounds, CallablePath, ConfigModel, VariableName
from megatron_dppo.tasks.workers.sandbox import Sandbox


class EnvironmentConfig(ConfigModel):
    """An environment with `reset` and `step`, made anew for every episode.

    In an episode `rollout.max_response_tokens` limits each turn, and `rollout.max_prompt_tokens` everything before the
    last one: an episode ends, truncated, where its next turn would not fit.
    """

    name: str = Field(min_length=1)
    """An id of GEM's registry, for example `game:Sudoku-v0-easy`; with `factory` a name for messages, and that when
    absent."""
    factory: CallablePath | None = None
    """`package.module:callable` or `file.py:callable` that makes an environment which is not GEM's."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""
    hidden_state: bool = False
    """The seed decides more than the first observation shows, as a number to guess: every seed is a question. Otherwise
    seeds that begin alike are one question, so that none is both trained on and held out."""
    step_timeout_s: float = Field(default=60.0, gt=0)
    """After this a step is over, and its episode: the first includes the making of the environment and its `reset`. An
    episode whose step hangs, raises, or gives anything but text, a finite number inside `bounds` and two truth values
    keeps the reward of the steps before, does not count as correct, and is counted (`reward/errors/environment`,
    `reward/timeouts/environment`). Where all episodes of a step end so the run stops, with the reason."""
    bounds: Bounds = (-100.0, 100.0)
    """Least and greatest reward of a step."""
    sandbox: Sandbox = "full"
    """`full`: an episode is a process of its own, whose steps can compute, read code and the folder the run was started
    in, and nothing else, see `PythonReward.sandbox`; the environment is made and `reset` before the sandbox closes.
    `none`: for environments whose steps need the network, processes or threads, with the rights of the run's user."""
    environment: tuple[VariableName, ...] = ()
    """Names of environment variables that it sees besides those that programs need to run."""
    max_turns: int = Field(default=64, ge=1)
    """Turns after which an episode is cut off, whatever the environment says."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("name") is None and given.get("factory"):
            return given | {"name": given["factory"]}
        return given
