"""Reward functions that people write, well and badly."""

from __future__ import annotations

import math
import os
import time
from typing import Any

import numpy as np


def length(*, response: str, **_: Any) -> float:
    return len(response) / 10


def numpy_score(*, answer: str | None, reference: str, **_: Any) -> np.float32:
    return np.float32(answer == reference)


def numpy_verdict(*, answer: str | None, reference: str, **_: Any) -> np.bool_:
    return np.equal(answer, reference)


def picky(*, response: str, metadata: dict[str, Any], **_: Any) -> Any:
    """Does to each response what it asks for."""
    if response == "raise":
        raise KeyError("no such thing")
    if response == "hang":
        time.sleep(3600)
    if response == "spin":
        return math.factorial(10**9)  # inside C, deaf to signals
    if response == "nan":
        return math.nan
    if response == "crash":
        os._exit(3)
    if response == "eat":
        return len(bytearray(1 << 40))
    return metadata["worth"]


def text(**_: Any) -> str:
    return "good"


not_callable = 3


def even_length(*, response: str, **_: Any) -> bool:
    return len(response) % 2 == 0


def huge(*, response, **_):
    """A float that float32 does not hold, if the response says so."""
    return float(response)
