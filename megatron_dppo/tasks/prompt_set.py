"""Questions in two disjoint sets, trained on in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.task import Prompt


class PromptSet:
    """The prompts of a task, which inherits from this. Any position of the endless training stream can be asked for at
    any time, so a run that is resumed needs its step number and nothing else to go on with the very next prompt."""

    def __init__(self, held_out: Sequence[Prompt], train: Sequence[Prompt], seed: int) -> None:
        self._held_out, self._train, self._seed = list(held_out), list(train), seed
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        digest = hashlib.sha256(repr(seed).encode())
        for prompt in self._train:
            digest.update(prompt.prompt_ids.tobytes() + b"|" + prompt.answer.encode("utf-8", "surrogatepass") + b"|")
        self.fingerprint = digest.hexdigest()
        """Changes with the prompts, their reference answers and their order."""

    @property
    def epoch_size(self) -> int:
        return len(self._train)

    @property
    def held_out_size(self) -> int:
        return len(self._held_out)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """See `Task.prompts`."""
        if start < 0 or count < 0:
            raise ValueError(f"prompts({start}, {count}): positions and counts are not negative")
        size = self.epoch_size
        return [self._train[self._permutation(place // size)[place % size]] for place in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        """See `Task.held_out`."""
        if count > self.held_out_size:
            raise UserError(f"{count} held-out prompts are wanted, task.held_out_size={self.held_out_size}; raise it")
        return self._held_out[:count]

    def report(self) -> list[str]:
        """See `Task.report`."""
        return []

    def _permutation(self, epoch: int) -> np.ndarray:
        made, order = self._order  # read once: steps of two epochs may ask from two threads
        if made != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(self.epoch_size)
            self._order = (epoch, order)
        return order
