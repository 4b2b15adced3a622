"""A place in a task's endless stream of training prompts."""

from __future__ import annotations

from typing import Any

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.task import Prompt, Task


class PromptStream:
    """Hands out a task's training prompts in order and remembers how far it is.

    `state()` is plain data for a checkpoint; a stream restored from it continues with the very next prompt.
    """

    def __init__(self, task: Task, position: int = 0) -> None:
        self._task = task
        self._position = position

    @property
    def position(self) -> int:
        """Prompts handed out so far, over all epochs."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epoch of the next prompt, from 0."""
        return self._position // self._task.epoch_size

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts."""
        prompts = self._task.prompts(self._position, count)
        self._position += count
        return prompts

    def state(self) -> dict[str, Any]:
        return {"position": self._position, "fingerprint": self._task.fingerprint}

    def restore(self, state: dict[str, Any]) -> None:
        """Go where `state` was taken. Raises UserError if the task's prompts are not the ones it was taken from."""
        if state["fingerprint"] != self._task.fingerprint:
            raise UserError(
                "the checkpoint was written with other prompts (the task section or the tokenizer changed), so it "
                "cannot say where to continue; restore the task settings or start a new run"
            )
        self._position = int(state["position"])
