"""Questions in two disjoint sets, trained on in an order that depends on the seed and the epoch alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.rewards.grader import Grader
from megatron_dppo.tasks.task import Prompt


class PromptSet:
    """A task: what is trained on, what is held out, and what scores answers.

    Everything is a function of the configuration and the tokenizer, so any process that builds it sees the same prompts
    under the same numbers. Any position of the endless training stream can be asked for at any time, so a run that is
    resumed needs its step number and nothing else to go on with the very next prompt.
    """

    def __init__(
        self,
        held_out: Sequence[Prompt],
        train: Sequence[Prompt],
        seed: int,
        grader: Grader | None = None,
        report: Sequence[str] = (),
    ) -> None:
        """
        train   of an epoch; one that is there several times comes so often
        grader  None where answers are not scored by themselves, as those of an environment's episodes
        report  lines for people: where the prompts came from, and what was left out
        """
        self.report = report
        self._held_out, self._train, self._seed, self.grader = list(held_out), list(train), seed, grader
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))
        if grader is not None:
            grader.check([*self._train, *self._held_out])
        digest = hashlib.sha256(repr(seed).encode())
        for prompt in self._train:
            digest.update(prompt.prompt_ids.tobytes() + b"|" + prompt.answer.encode("utf-8", "surrogatepass") + b"|")
        self.fingerprint = digest.hexdigest()
        """Changes with the prompts, their reference answers and their order; a resumed run compares it."""

    @property
    def epoch_size(self) -> int:
        """Training questions, each as often as it comes."""
        return len(self._train)

    @property
    def held_out_size(self) -> int:
        """Distinct held-out questions."""
        return len(self._held_out)

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Training prompts at positions `start` to `start + count` of the endless stream: epoch after epoch, each a
        permutation of the training questions drawn from (seed, epoch)."""
        if start < 0 or count < 0:
            raise ValueError(f"prompts({start}, {count}): positions and counts are not negative")
        size = self.epoch_size
        return [self._train[self._permutation(place // size)[place % size]] for place in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts. Raises UserError if there are fewer."""
        if count > self.held_out_size:
            raise UserError(f"{count} held-out prompts are wanted, task.held_out_size={self.held_out_size}; raise it")
        return self._held_out[:count]

    def close(self) -> None:
        """End whatever was started to score answers."""
        if self.grader is not None:
            self.grader.close()

    def _permutation(self, epoch: int) -> np.ndarray:
        made, order = self._order  # read once: steps of two epochs may ask from two threads
        if made != epoch:
            order = np.random.default_rng((self._seed, epoch)).permutation(self.epoch_size)
            self._order = (epoch, order)
        return order


def drawn_sizes(config: TaskConfig) -> tuple[int, int, int]:
    """Of questions that are drawn: how many are held out, how many are wanted in all, and how often to draw. A space of
    questions hardly larger than what is wanted repeats itself often before the last new one turns up."""
    held_out = 256 if config.held_out_size is None else config.held_out_size
    wanted = held_out + (config.train_size or 2048)
    return held_out, wanted, 10 * wanted + 1000
