"""Seeds of single requests, so that a rollout does not depend on how many came before it."""

from __future__ import annotations

import hashlib


def request_seed(run_seed: int, stream: str, step: int, prompt: int, sample: int) -> int:
    """63-bit seed of one answer; the same numbers give the same seed on every machine.

    stream separates uses of the same numbers: "train", "eval".
    """
    key = f"{run_seed}/{stream}/{step}/{prompt}/{sample}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 1
