"""What an environment is: GEM's own interface, so that its environments need no adapter."""

from __future__ import annotations

from typing import Any, Protocol, SupportsFloat


class Environment(Protocol):
    """A text environment. `info` may carry `prefix` and `suffix`, which are put around the observation."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        """Start an episode, the same for the same seed; returns `(observation, info)`."""
        ...

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """Act; returns `(observation, reward, terminated, truncated, info)`."""
        ...


def observation_text(observation: str, info: dict[str, Any]) -> str:
    """The observation as the policy reads it, with `info`'s prefix and suffix around it, as GEM's wrapper puts them."""
    prefix, suffix = info.get("prefix", ""), info.get("suffix", "")
    if suffix and observation and not observation.endswith("\n"):
        observation += "\n"
    return f"{prefix}{observation}{suffix}"
