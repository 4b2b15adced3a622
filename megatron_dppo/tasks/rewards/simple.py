"""Rewards that cannot hang: they run where they are asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.tasks.rewards.patterns import compile_pattern, match_all
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict


@dataclass(frozen=True)
class ExactMatch:
    """1 where the answer is a reference, runs of white space counting as one space."""

    ignore_case: bool = False

    def verify(self, items: Sequence[Answered]) -> list[Verdict]:
        return [
            Verdict(score=0.0, well_formed=False)
            if item.answer is None
            else Verdict(
                score=float(self._plain(item.answer) in map(self._plain, (item.reference, *item.also_accepted)))
            )
            for item in items
        ]

    def _plain(self, text: str) -> str:
        text = " ".join(text.split())
        return text.casefold() if self.ignore_case else text


@dataclass(frozen=True)
class Format:
    """1 where the whole response matches `pattern`."""

    pattern: str

    def verify(self, items: Sequence[Answered]) -> list[Verdict]:
        responses = [item.response for item in items]
        matches = match_all(compile_pattern(self.pattern), responses, field="task.rewards: pattern")
        return [
            Verdict(score=0.0, well_formed=False, error=str(match), timed_out=True)
            if isinstance(match, TimeoutError)
            else Verdict(score=float(match is not None), well_formed=match is not None)
            for match in matches
        ]


@dataclass(frozen=True)
class Overlong:
    """Soft punishment of length |y|, with L the longest response and c the buffer (DAPO, arXiv 2503.14476, Eq. 13):

    0                       |y| <= L - c
    ((L - c) - |y|) / c     L - c < |y| <= L
    -1                      |y| > L
    """

    max_response_tokens: int
    buffer_tokens: int

    def verify(self, items: Sequence[Answered]) -> list[Verdict]:
        return [Verdict(score=self.punishment(item.tokens)) for item in items]

    def punishment(self, tokens: int | None) -> float:
        """Raises ValueError without a length: text alone does not tell how many tokens the policy wrote."""
        if tokens is None:
            raise ValueError("the overlong reward needs the lengths of the responses in tokens")
        over = tokens - (self.max_response_tokens - self.buffer_tokens)
        return -min(max(over / self.buffer_tokens, 0.0), 1.0)
