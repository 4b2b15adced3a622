"""The format string of a prompt, checked before any row is read."""

from __future__ import annotations

import re
from string import Formatter
from typing import Annotated

from pydantic import AfterValidator

_BRACES = "write {{ and }} for braces of the text"


def _check(template: str) -> str:
    """ValueError for a string that cannot be filled, or that would be the same for every question."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise ValueError(f"not a format string ({error}); {_BRACES}") from error
    for field in fields:
        if re.split(r"[.\[]", field)[0] not in ("question", "metadata"):
            raise ValueError(f"{{{field}}} is neither {{question}} nor {{metadata[...]}}; {_BRACES}")
    if not fields:
        raise ValueError("shows neither {question} nor {metadata[...]}, so every prompt would be the same")
    return template


PromptTemplate = Annotated[str, AfterValidator(_check)]
"""A Python format string over `question` and `metadata`."""
