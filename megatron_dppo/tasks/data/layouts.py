"""The layouts in which mathematics questions are published."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_dppo.tasks.data.config import FieldMap

LAYOUTS: dict[str, FieldMap] = {
    # BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024: the prompt as messages, the answer in the reward model's settings.
    "dapo-math": FieldMap(messages="prompt", answer="reward_model.ground_truth"),
    # Hendrycks et al. (2021), one JSON file per problem or one row; MATH-500 adds the answer by itself.
    "math": FieldMap(question="problem", answer="answer", solution="solution"),
    # HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime25, yentinglin/aime_2025, opencompass/AIME2025.
    "aime": FieldMap(question="problem|Problem|question", answer="answer|Answer"),
    "question-answer": FieldMap(question="question|prompt", answer="answer|target"),
}
ABSENT = object()
"""What `look_up` returns where a row does not have a field."""


def detect_layout(row: Mapping[str, Any]) -> str | None:
    """The first layout whose fields `row` has; None where there is none."""
    for name, fields in LAYOUTS.items():
        prompt = fields.question or fields.messages or ""
        reference = [path for path in (fields.answer, fields.solution) if path is not None]
        value = look_up(row, prompt)
        fits = value is not ABSENT and isinstance(value, str) == (fields.messages is None)
        if fits and any(look_up(row, path) is not ABSENT or has_null(row, path) for path in reference):
            return name
    return None


def asks_nothing(row: Mapping[str, Any]) -> bool:
    """Whether the field of some layout's question is there, and null."""
    prompts = [fields.question or fields.messages or "" for fields in LAYOUTS.values()]
    return any(has_null(row, path) and look_up(row, path) is ABSENT for path in prompts)


def has_null(row: Mapping[str, Any], path: str) -> bool:
    """Whether `row` has the field at the beginning of `path`, though nothing is in it."""
    return any(alternative.split(".")[0] in row for alternative in path.split("|"))


def look_up(row: Mapping[str, Any], path: str) -> Any:
    """The value at the first of the alternative paths that `row` has, `ABSENT` where it has none. A null counts as
    absent: Parquet has no other way to leave a field out."""
    for alternative in path.split("|"):
        value: Any = row
        for part in alternative.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                value = ABSENT
                break
        if value is not ABSENT and value is not None:
            return value
    return ABSENT
