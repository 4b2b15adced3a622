"""Keeping what is secret out of everything a run writes."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

HIDDEN = "***"
_NAMES = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|CREDENTIAL)", re.IGNORECASE)
_SHAPES = re.compile(
    r"\b(hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}|gh[pousr]_[A-Za-z0-9]{30,}|AKIA[0-9A-Z]{16})\b|(?<=://)[^\s/:@]+:[^\s/@]+(?=@)"
)
"""Tokens of well-known services, and user:password in an address."""
_SHORTEST = 6
"""Shorter values (`true`, `0`) would hide ordinary words."""


def secret_values(environment: Mapping[str, str] | None = None) -> list[str]:
    """Values of the environment variables that are named like secrets, the longest first."""
    environment = os.environ if environment is None else environment
    values = {v for name, v in environment.items() if _NAMES.search(name) and len(v) >= _SHORTEST}
    return sorted((v for v in values if not v.startswith("/")), key=len, reverse=True)


def redact(text: str, environment: Mapping[str, str] | None = None) -> str:
    """`text` with every secret of the environment and everything that looks like one replaced by `***`."""
    for value in secret_values(environment):
        text = text.replace(value, HIDDEN)
    return _SHAPES.sub(HIDDEN, text)
