"""Random seeds of requests."""

from __future__ import annotations

import numpy as np

TRAINING, EVALUATION = 0, 1
"""Streams: the same numbers never give the same seed in both."""


def request_seed(run: int, step: int, prompt: int, sample: int, *, stream: int = TRAINING, turn: int = 0) -> int:
    """The seed of one sampled response: a hash of (run seed, stream, step, prompt number, sample, turn), in
    `[0, 2^63)`.

    Resumed runs, retried requests and other batch compositions draw the same random numbers; no two requests of a run
    share a stream except by a hash collision (torch's CPU generator keeps 32 bits of the seed).
    """
    words = np.random.SeedSequence((run, stream, step, prompt, sample, *([turn] if turn else []))).generate_state(
        1, np.uint64
    )
    return int(words[0] >> np.uint64(1))


def continued_seed(seed: int, part: int) -> int:
    """The seed of part `part` (1, 2, ...) of a response that was cut: a hash of both, in `[0, 2^63)`. A part must not
    draw again the numbers that the part before it drew."""
    return int(np.random.SeedSequence((seed, part)).generate_state(1, np.uint64)[0] >> np.uint64(1))
