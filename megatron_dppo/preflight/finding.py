"""One thing that is wrong, or worth knowing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_dppo.errors import UserError


@dataclass(frozen=True)
class Finding:
    """A line of a report."""

    check: str
    """What was looked at, a short name that scripts can rely on."""
    level: Literal["error", "warning", "ok"]
    """At an "error" it will fail, or silently be wrong; at a "warning" it may; "ok" is a figure to know."""
    problem: str
    fix: str
    """Empty where nothing is wrong."""

    @property
    def text(self) -> str:
        """What is wrong and what to do."""
        return f"{self.problem}; {self.fix}" if self.fix else self.problem

    def __str__(self) -> str:
        return f"{self.level}: {self.check}: {self.text}"


def error(check: str, problem: str, fix: str) -> Finding:
    return Finding(check, "error", problem, fix)


def warning(check: str, problem: str, fix: str) -> Finding:
    return Finding(check, "warning", problem, fix)


def idle(check: str, problem: str) -> Finding:
    """A setting that does nothing. A state may go on, and the setting that it was saved with must stay."""
    return warning(check, problem, "a run that does not go on from another's state can leave it out")


def ok(check: str, figure: str) -> Finding:
    return Finding(check, "ok", figure, "")


def attempt[T](check: str, fix: str, work: Callable[[], T]) -> Generator[Finding, None, T | None]:
    """Returns what `work` does; yields the finding that its `UserError` is, with `fix` where the error names none."""
    try:
        return work()
    except UserError as problem:
        yield error(check, str(problem), "" if "; " in str(problem) else fix)
        return None


def raise_first(findings: Iterable[Finding]) -> None:
    """Raise the first error among `findings` as a `UserError`."""
    for finding in findings:
        if finding.level == "error":
            raise UserError(finding.text)
