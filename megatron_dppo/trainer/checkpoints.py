"""Training states of a run, and what must not change when it is resumed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.results import UpdateProgress
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import CHECKPOINTS

logger = logging.getLogger(__name__)

_FIXED = ("algorithm", "optimizer", "lora", "rollout.temperature", "rollout.oversample", "trainer.prompts_per_step",
          "trainer.samples_per_prompt", "trainer.prompts_per_mini_batch", "trainer.ppo_epochs", "run.seed")  # fmt: skip
"""Settings that decide what the next gradient step is. Layout, budgets, engines, step counts may change."""
_FREE = ("optimizer.overlap_",)
"""Those among them that decide only when ranks talk to each other."""


def checkpoint_root(config: Config) -> Path:
    """Where the training states of a run are."""
    return config.run.dir / CHECKPOINTS


class Checkpoints:
    """Saves and restores the actor with the loop's position. Every method is a collective over all ranks."""

    def __init__(self, config: Config, task_fingerprint: str, actor: MegatronActor) -> None:
        self._fixed = _fixed_settings(config) | {"task": task_fingerprint}
        self._states = TrainingStates(
            checkpoint_root(config), actor.trainee, keep=config.trainer.keep_checkpoints, asynchronous=False
        )

    def save(self, step: int, *, broken_off: UpdateProgress | None = None) -> None:
        """The state after `step` rollout steps. Prompts and seeds of the next step follow from its number alone.

        broken_off  the last of them, where it is not whole
        """
        part = {} if broken_off is None else {"gradient_steps": [broken_off.done, broken_off.of]}
        self._states.save(step, {"step": step, "fixed": self._fixed} | part)

    def restore(self) -> int:
        """Load the latest state; returns the number of rollout steps done.

        Raises UserError where there is none, or where a setting that decides the next step is another one now.
        """
        resumed = self._states.load()
        if changed := difference(resumed.progress["fixed"], self._fixed):
            raise UserError(
                f"cannot resume {resumed.folder}: {changed}; set it back, or start a new run from the exported model"
            )
        if (made := resumed.progress.get("gradient_steps")) is not None:
            logger.warning("%s: its last step was broken off after %d of %d gradient steps", resumed.folder, *made)
        return int(resumed.progress["step"])


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The first setting that is not what it was, in words; "" where all are alike. Of a mapping (the preset's
    overrides) either side may have an entry that the other lacks."""
    for name in [*now, *sorted(before.keys() - now.keys())]:
        if not name.startswith(_FREE) and before.get(name) != now.get(name):
            was, value = (repr(side[name]) if name in side else "absent" for side in (before, now))
            return f"{name} was {was} and is {value} now"
    return ""


def _fixed_settings(config: Config) -> dict[str, Any]:
    """Dotted key to value for every setting of `_FIXED`."""
    return {key: value for key, value in flatten(config.model_dump(mode="json")).items() if key.startswith(_FIXED)}


def flatten(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys of nested sections."""
    result: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        result |= flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return result
