"""The verifier of a reasoning-gym dataset, for a worker process."""

from __future__ import annotations

import importlib
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megatron_dppo.tasks.rewards.verdict import Answered, Verdict

_EXPRESSION = re.compile(
    r"""(?: \d++(?:\.\d*+)? | \.\d++                                   # numbers
          | (?:a?(?:sin|cos|tan)h?|cot|sec|csc|exp|log|ln|sqrt|Abs|erf|factorial|Integer|Integral|Rational)\s*+\(
          | [A-Za-z][A-Za-z0-9]*+(?!\s*+\()                           # variables and constants: nothing that is called
          | (?<![\w!])\( | [)!](?!\s*+[\w(])                          # brackets that do not call either
          | [-+*/^,\s] )*+""",
    re.VERBOSE | re.ASCII,
)
"""Arithmetic, as a pattern that holds nothing which Python or sympy could call."""
_LIST = re.compile(r"[\w\s,\[\]'\"-]*")
"""Nested lists of words and numbers."""
EVALUATED: Mapping[str, re.Pattern[str]] = {
    **dict.fromkeys(
        ("countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"),
        _EXPRESSION,
    ),
    **dict.fromkeys(("binary_matrix", "spiral_matrix", "string_insertion", "n_queens"), _LIST),
}
"""Datasets of reasoning-gym 0.1.25 whose verifiers give an answer to `eval` or to sympy's parser, which is `eval`
again; and the answers among which the verifier's right ones lie."""
_UNREADABLE = "("


@dataclass(frozen=True)
class GymVerifier:
    """The dataset's own score in [0, 1].

    Where a verifier evaluates answers it only gets those that cannot call anything; any other is put to it as one that
    it cannot read, and scored as it scores that. So text that runs, and could forge the score of its own answer, is
    never run at all; the sandbox is for what this misses, and for powers without end.
    """

    dataset: str
    parameters: dict[str, Any] = field(default_factory=dict)
    """Of the dataset, seed and size among them."""

    @property
    def evaluates(self) -> bool:
        """Nothing is known of a dataset that was registered from elsewhere."""
        return self.dataset in EVALUATED or not type(_dataset(self)).__module__.startswith("reasoning_gym.")

    def prepare(self) -> None:
        """Import what takes seconds, before the clock of the first answer runs."""
        _dataset(self)

    def __call__(self, item: Answered) -> Verdict:
        """That a verifier fails depends on what the policy writes and must not end a run."""
        if item.answer is None:
            return Verdict(score=0.0, well_formed=False)
        entry = {"question": item.question, "answer": item.reference, "metadata": dict(item.metadata)}
        try:
            score = float(_dataset(self).score_answer(self._readable(item.answer), entry))
        except Exception as error:
            return Verdict(score=0.0, error=f"the verifier of {self.dataset} on {item.answer!r:.200}: {error!r}")
        return Verdict(score=score)

    def _readable(self, answer: str) -> str:
        pattern = EVALUATED.get(self.dataset)
        return answer if pattern is None or pattern.fullmatch(answer) else _UNREADABLE


_made: dict[str, Any] = {}


def _dataset(verifier: GymVerifier) -> Any:
    key = repr(verifier)
    if key not in _made:
        _made[key] = gym_factory().create_dataset(verifier.dataset, **verifier.parameters)
    return _made[key]


def gym_factory() -> ModuleType:
    """reasoning-gym's module that knows and makes its datasets; imported when it is needed, which takes seconds."""
    with warnings.catch_warnings():
        # A dependency of the library has a doubtful comparison in its source, reported on first import.
        warnings.simplefilter("ignore", SyntaxWarning)
        return importlib.import_module("reasoning_gym.factory")
