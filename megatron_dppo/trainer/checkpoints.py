"""Training states of a run, and what must not change when it is resumed."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Any

from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.results import UpdateProgress
from megatron_dppo.checkpoint.training_state import TrainingStates
from megatron_dppo.config.schema import Config
from megatron_dppo.errors import UserError
from megatron_dppo.trainer.history import CHECKPOINTS
from megatron_dppo.trainer.resume import allowed, differences
from megatron_dppo.trainer.window import WindowState

logger = logging.getLogger(__name__)


def checkpoint_root(config: Config) -> Path:
    """Where the training states of a run are."""
    return config.run.dir / CHECKPOINTS


class Checkpoints:
    """Saves and restores the actor with the loop's position. Every method is a collective over all ranks."""

    def __init__(self, config: Config, fixed: dict[str, Any], actor: MegatronActor) -> None:
        """`fixed` is what must be the same when a run goes on from a state, see `resume.facts`."""
        self._fixed, self._changed = fixed, config.trainer.resume_changed
        self.window: dict[int, WindowState] = {}
        """After the steps by number, where the schedule has one: what is saved with a step."""
        self.again = f"run.dir={shlex.quote(str(config.run.dir))} trainer.resume=true"
        """What goes on from the newest of them, given to the command that started the run."""
        self._states = TrainingStates(checkpoint_root(config), actor.trainee, keep=config.trainer.keep_checkpoints)

    def save(self, step: int, *, broken_off: UpdateProgress | None = None) -> None:
        """The state after `step` rollout steps. Prompts and seeds of the next step follow from its number, and from the
        window after it where there is one.

        broken_off  the last of them, where it is not whole
        """
        part: dict[str, Any] = {} if broken_off is None else {"gradient_steps": [broken_off.done, broken_off.of]}
        if (window := self.window.get(step)) is not None:
            part |= {"window": [window.begun, *window.waiting]}
        self._states.save(step, {"fixed": self._fixed} | part)

    def restore(self) -> int:
        """Load the latest state; returns the number of rollout steps done.

        Raises UserError where there is none, or where a setting that decides the next step is another one now.
        """
        resumed = self._states.load()
        for name, change in differences(resumed.progress["fixed"], self._fixed).items():
            if not allowed(name, self._changed):
                raise UserError(
                    f"cannot resume {resumed.folder}: {change}; set it back, name it in trainer.resume_changed, or "
                    "start a new run from the exported model"
                )
            logger.warning("%s: going on though %s", resumed.folder, change)
        if (made := resumed.progress.get("gradient_steps")) is not None:
            logger.warning("%s: its last step was broken off after %d of %d gradient steps", resumed.folder, *made)
        if (window := resumed.progress.get("window")) is not None:
            self.window[resumed.step] = WindowState(window[0], tuple(window[1:]))
        return resumed.step
