"""What an environment is: GEM's own interface, so that its environments need no adapter; and from a name to one."""

from __future__ import annotations

import logging
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, SupportsFloat

import numpy as np

from megatron_dppo.errors import UserError, did_you_mean
from megatron_dppo.launch.imports import load_callable
from megatron_dppo.tasks.environments.config import EnvironmentConfig


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


def environment_maker(config: EnvironmentConfig, folder: str | None = None) -> Callable[[], Environment]:
    """A function that makes the environment of `config`, whose files and modules are looked for in `folder` (the
    working folder when absent). Raises UserError for a name that leads nowhere."""
    make: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    if config.factory is not None:
        make = load_callable(config.factory, named="task.environment.factory: ", folder=folder)
    else:
        gem = _import_gem(config.name)
        known = gem.envs.registration.ENV_REGISTRY
        if config.name not in known:
            hint = did_you_mean(config.name, known)
            raise UserError(f"task.environment.name={config.name!r} is not in GEM's registry{hint}")
        make, arguments = gem.make, (config.name,)

    def made() -> Environment:
        with own_random_state():
            try:
                environment = make(*arguments, **config.parameters)
            except TypeError as error:
                raise UserError(f"task.environment.parameters are refused by {config.name}: {error}") from error
        for method in ("reset", "step"):
            if not callable(getattr(environment, method, None)):
                raise UserError(f"task.environment.name={config.name!r} makes something without {method}()")
        return environment

    return made


_GENERATORS = threading.RLock()


@contextmanager
def own_random_state() -> Iterator[None]:
    """Environments seed Python's and numpy's global generators; what they do there stays inside. One thread at a time:
    an episode of a step and one of an evaluation, begun together, would start in states that belong to neither's seed.
    """
    with _GENERATORS:
        python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def _import_gem(name: str) -> Any:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            import gem
    except ImportError as error:
        raise UserError(
            f"task.environment.name={name!r} is GEM's, which cannot be imported ({error}); install it by "
            "uv pip install --no-deps gem-llm==0.1.0"
        ) from error
    finally:
        root.handlers[:] = handlers  # it sets the root logger up on import
        root.setLevel(level)
    return gem
