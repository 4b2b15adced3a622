"""Which environment a policy acts in."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from megatron_dppo.config_base import ConfigModel


class EnvironmentConfig(ConfigModel):
    """An environment with `reset` and `step`, made anew for every episode.

    In an episode `rollout.max_response_tokens` limits each turn, and `rollout.max_prompt_tokens` everything before the
    last one: an episode ends, truncated, where its next turn would not fit.
    """

    name: str = Field(min_length=1)
    """An id of GEM's registry, for example `game:Sudoku-v0-easy`; with `factory` a name for messages."""
    factory: str | None = Field(default=None, pattern=r"^[\w.]+:[A-Za-z_]\w*$")
    """`package.module:callable` that makes an environment which is not GEM's."""
    parameters: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of its constructor."""
    max_turns: int = Field(default=64, ge=1)
    """Turns after which an episode is cut off, whatever the environment says."""
