"""Mathematical equality by math-verify, for a worker process."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from megatron_dppo.tasks.rewards.verdict import Answered, Verdict

_DELIMITERS = ("$", "\\boxed", "\\fbox", "\\(", "\\[", "\\begin")


@dataclass(frozen=True)
class MathJudge:
    """1 where the answer equals the reference. math-verify's own limits use SIGALRM, so this runs in the main thread
    of a worker process; the pool kills what ignores the signal (a power of huge numbers inside GMP)."""

    boxed_only: bool = False
    precision: int = 6
    timeout_s: int = 5

    evaluates = False
    """Its grammar is its own; what sympy's parser gets has passed it."""

    def prepare(self) -> None:
        """Import what takes seconds, before the clock of the first answer runs."""
        self(Answered(question="", reference="1", response="$1$", answer="$1$"))

    def __call__(self, item: Answered) -> Verdict:
        from math_verify import verify
        from math_verify.errors import TimeoutException

        if item.answer is None:
            return Verdict(score=0.0, well_formed=False)
        try:
            reference = _parse_reference(item.reference, self.timeout_s)
            if not reference:
                return Verdict(score=0.0, error=f"the reference answer {item.reference!r} is no mathematics")
            answer = self._parse(item.answer)
            if not answer:
                return Verdict(score=0.0, well_formed=False)
            equal = verify(
                reference,
                answer,
                float_rounding=self.precision,
                timeout_seconds=self.timeout_s,
                raise_on_error=True,
            )
        except TimeoutException:
            return Verdict(score=0.0, error=f"not decided within {self.timeout_s} s", timed_out=True)
        # What a policy writes can make sympy raise nearly anything.
        except Exception as error:
            return Verdict(score=0.0, error=f"math-verify raised {type(error).__name__}: {error}")
        return Verdict(score=float(equal))

    def _parse(self, answer: str) -> list[Any]:
        from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

        if self.boxed_only and "\\boxed" not in answer:
            return []
        targets: list[Any] = [LatexExtractionConfig(boxed_match_priority=0)]
        if not self.boxed_only:
            targets.append(ExprExtractionConfig())
        if _is_bare_latex(answer):
            parsed = parse(_boxed(answer), targets, parsing_timeout=self.timeout_s)
            if parsed:
                return parsed
        return parse(answer, targets, parsing_timeout=self.timeout_s)


@functools.lru_cache(maxsize=1024)  # all samples of a prompt share their reference
def _parse_reference(reference: str, timeout_s: int) -> list[Any]:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    delimited = any(sign in reference for sign in _DELIMITERS)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    parsed = parse(reference if delimited else _boxed(reference), targets, parsing_timeout=timeout_s)
    return parsed or parse(reference, targets, parsing_timeout=timeout_s)


def _is_bare_latex(answer: str) -> bool:
    """One line of LaTeX that is not marked as such: `\\frac{1}{2}` after "Answer:"."""
    return "\\" in answer and "\n" not in answer.strip() and not any(sign in answer for sign in _DELIMITERS)


def _boxed(text: str) -> str:
    return f"\\boxed{{{text.strip()}}}"
