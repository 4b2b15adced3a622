"""One thing that is wrong, or worth knowing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's report.

    check    what was looked at, a short name that scripts can rely on
    level    "error": it will fail, or silently be wrong; "warning": it may; "ok": nothing is wrong, a figure to know
    fix      empty where nothing is wrong
    """

    check: str
    level: Literal["error", "warning", "ok"]
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.level}: {self.check}: {self.problem}" + (f"; {self.fix}" if self.fix else "")


def error(check: str, problem: str, fix: str) -> Finding:
    return Finding(check, "error", problem, fix)


def warning(check: str, problem: str, fix: str) -> Finding:
    return Finding(check, "warning", problem, fix)


def ok(check: str, figure: str) -> Finding:
    return Finding(check, "ok", figure, "")
