"""Mathematical equality, for a worker process."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_dppo.tasks.rewards.canonical import canonical
from megatron_dppo.tasks.rewards.equality import LONGEST, equal, readable, reference_text
from megatron_dppo.tasks.rewards.final_answer import final_answer
from megatron_dppo.tasks.rewards.verdict import Answered, Verdict
from megatron_dppo.tasks.rewards.words import is_words


@dataclass(frozen=True)
class MathVerifier:
    """1 where the final answer equals the reference: see `final_answer` and `equality`. The time limit uses SIGALRM, so
    this runs in the main thread of a worker process; the pool kills what ignores the signal."""

    boxed_only: bool = False
    precision: int = 6
    timeout_s: int = 5

    evaluates = False
    """Its grammar is its own; what sympy's parser gets has passed it."""

    def prepare(self) -> None:
        """Import what takes seconds, before the clock of the first answer runs."""
        self(Answered(question="", reference="x+1", response="", answer="$\\frac{2x+2}{2}$"))

    def __call__(self, item: Answered) -> Verdict:
        from math_verify.errors import TimeoutException
        from math_verify.utils import timeout

        if not item.reference.strip():
            return Verdict(score=0.0, error="the reference answer is empty")
        answer = None if item.answer is None else final_answer(item.answer, boxed_only=self.boxed_only)
        if answer is None or len(answer) > LONGEST:
            return Verdict(score=0.0, well_formed=False)
        try:
            limited = timeout(timeout_seconds=self.timeout_s)(self._equals_one)
            if limited((item.reference, *item.also_accepted), answer):
                return Verdict(score=1.0)
        except TimeoutException:
            return Verdict(score=0.0, error=f"not decided within {self.timeout_s} s", timed_out=True)
        # What a policy writes can make sympy raise nearly anything.
        except Exception as error:
            return Verdict(score=0.0, error=f"math-verify raised {type(error).__name__}: {error}"[:500])
        words_for_mathematics = is_words(canonical(answer)) and not is_words(canonical(reference_text(item.reference)))
        return Verdict(score=0.0, well_formed=not words_for_mathematics)

    def _equals_one(self, references: Sequence[str], answer: str) -> bool:
        return any(equal(reference, answer, precision=self.precision) for reference in references)


_PLAIN_NUMBER = re.compile(r"-?[0-9]{1,100}(?:[./][0-9]{1,100})?")


def meets_itself(reference: str) -> bool:
    """Whether an answer that is the reference, in a box, would earn the point. Takes a fraction of a millisecond: the
    same text needs no mathematics."""
    if _PLAIN_NUMBER.fullmatch(reference):
        return True
    expected = readable(reference)
    answer = final_answer(f"\\boxed{{{reference_text(reference)}}}")
    return expected is not None and answer is not None and expected == readable(answer)
