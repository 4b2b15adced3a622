"""Regular expressions of the user's on text of the policy's: with a limit on the time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import regex

from megatron_dppo.errors import UserError
from megatron_dppo.launch.secrets import redact

MATCH_TIMEOUT_S = 2.0
"""For one response, of the processor time of the whole process; a pattern without nested repeats takes a few
milliseconds on the longest."""
_CALL_TIMEOUT_S = 20.0
"""By the clock, for all responses of a call together that ran into that limit."""
_one_at_a_time = threading.Lock()
"""Beside others, whose processor time counts, a match would run into its limit sooner."""


def compile_pattern(pattern: str) -> regex.Pattern[str]:
    """`.` matches line breaks. Raises ValueError for what is no regular expression."""
    try:
        return regex.compile(pattern, regex.DOTALL)
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from error


def match_all(
    pattern: regex.Pattern[str], texts: Sequence[str], *, field: str
) -> list[regex.Match[str] | TimeoutError | None]:
    """The match of each whole text, None where it does not match, TimeoutError where that was not decided in time.
    Other threads run meanwhile. Raises UserError, naming `field`, where so many take too long that the caller would be
    held up."""
    found: list[regex.Match[str] | TimeoutError | None] = []
    lost = 0.0
    for text in texts:
        with _one_at_a_time:
            start = time.monotonic()
            try:
                found.append(pattern.fullmatch(text, timeout=MATCH_TIMEOUT_S, concurrent=True))
                continue
            except TimeoutError:
                found.append(TimeoutError(f"{field} took more than {MATCH_TIMEOUT_S:g} s to match"))
                lost += time.monotonic() - start
        if lost > _CALL_TIMEOUT_S:
            raise UserError(
                f"{field}={redact(repr(pattern.pattern)):.120} takes too long: more than {MATCH_TIMEOUT_S:g} s on "
                f"each of {sum(isinstance(one, TimeoutError) for one in found)} responses; write it without a "
                "repeat inside a repeat, such as (a*b*)*"
            )
    return found
