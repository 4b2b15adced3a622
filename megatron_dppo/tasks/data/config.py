"""Where rows come from, and which of their fields mean what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from megatron_dppo.config_base import ConfigModel, where_it_is


class FieldMap(ConfigModel):
    """Columns of a row. A path goes into nested values by dots and list positions (`prompt.0.content`), and names
    alternatives, the first of which that a row has, by `|` (`problem|question`)."""

    question: str | None = None
    """Text of the question."""
    messages: str | None = None
    """Chat messages (`[{role, content}, ...]`) instead of `question`; the last one is the user's question."""
    answer: str | None = None
    """Reference answer: a string or a number, or a list of those that are accepted."""
    solution: str | None = None
    """Worked solution, for rows without `answer`; the reference is what its last `\\boxed{...}` holds."""

    @model_validator(mode="after")
    def _is_complete(self) -> FieldMap:
        if (self.question is None) == (self.messages is None):
            raise ValueError("set one of question and messages")
        if self.answer is None and self.solution is None:
            raise ValueError("set answer, or solution to read the answer from")
        return self


class DataConfig(ConfigModel):
    """A set of questions with reference answers."""

    path: Annotated[str, Field(min_length=1), AfterValidator(where_it_is)]
    """A file (`.jsonl`, `.json`, both also as `.gz` or `.zst`, or `.parquet`), a folder of such files (read in the
    order of their names; where names tell splits, those of `split`), a folder that `datasets` saved, or the name of a
    dataset on the Hugging Face hub."""
    subset: str | None = None
    """Configuration of a dataset on the hub, for example `main`."""
    split: str = "train"
    """Split of a saved dataset, a dataset on the hub, or a folder whose files' names tell splits."""
    revision: str | None = None
    """Commit or tag of a dataset on the hub; its newest when absent."""
    layout: Literal["auto", "dapo-math", "math", "aime", "question-answer"] = "auto"
    """Published layout of the rows; `auto` takes the first that the first row fits. See docs/data.md."""
    fields: FieldMap | None = None
    """Another layout, spelled out."""

    @model_validator(mode="after")
    def _one_layout(self) -> DataConfig:
        if self.fields is not None and self.layout != "auto":
            raise ValueError("set layout or fields, not both")
        return self


ABSENT = object()
"""What `look_up` returns where a row does not have a field."""


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


def text_at(row: Mapping[str, Any], path: str) -> str | None:
    """What `look_up` finds, as text; None where a row does not have the field."""
    value = look_up(row, path)
    return None if value is ABSENT else str(value)
