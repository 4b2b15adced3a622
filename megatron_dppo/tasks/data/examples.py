"""From rows, in the layouts in which mathematics questions are published, to distinct examples, with an account of what
was left out."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dppo.errors import UserError, listed
from megatron_dppo.tasks.data.config import ABSENT, DataConfig, FieldMap, look_up
from megatron_dppo.tasks.data.rows import Row, read_rows, unread
from megatron_dppo.tasks.rewards.final_answer import boxed_answer

LAYOUTS: dict[str, FieldMap] = {
    # BytedTsinghua-SIA/DAPO-Math-17k and AIME-2024: the prompt as messages, the answer in the reward model's settings.
    "dapo-math": FieldMap(messages="prompt", answer="reward_model.ground_truth"),
    # Hendrycks et al. (2021), one JSON file per problem or one row; MATH-500 adds the answer by itself.
    "math": FieldMap(question="problem", answer="answer", solution="solution"),
    "question-answer": FieldMap(question="question|prompt", answer="answer|target"),
    # HuggingFaceH4/aime_2024, Maxwell-Jia/AIME_2024, math-ai/aime25, yentinglin/aime_2025, opencompass/AIME2025.
    "aime": FieldMap(question="problem|Problem|question", answer="answer|Answer"),
}


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


_NAMED = 3
"""Places that a report names of each kind."""


@dataclass(frozen=True)
class Example:
    """One question. `messages` end with the user's turn that asks it."""

    where: str
    messages: tuple[Mapping[str, str], ...]
    answer: str
    also_accepted: tuple[str, ...]
    """Other reference answers that are as good."""
    metadata: Mapping[str, Any] = field(repr=False)
    """The whole row."""

    @property
    def question(self) -> str:
        return self.messages[-1]["content"]


@dataclass
class DataReport:
    """What became of the rows of one source. The places are those of the rows that were left out."""

    source: str
    layout: str
    rows: int = 0
    kept: int = 0
    empty: list[str] = field(default_factory=list)
    """Blank lines, and rows whose question or answer is blank."""
    duplicates: int = 0
    """Rows that ask what an earlier row asks and give the same answer."""
    conflicting: list[str] = field(default_factory=list)
    """Rows that ask what an earlier row asks but give another answer; the first is kept."""
    too_long: list[str] = field(default_factory=list)
    """Prompts of more tokens than `rollout.max_prompt_tokens`."""
    unmeetable: list[str] = field(default_factory=list)
    """Rows that are kept, but whose reference no answer can equal."""
    unread: list[str] = field(default_factory=list)
    """Files of a folder that are of no kind that is read."""

    def lines(self) -> list[str]:
        """For people: one line, and one more per kind of row that deserves a look."""
        left_out = {
            "duplicates": self.duplicates,
            "empty": len(self.empty),
            "contradicting an earlier row": len(self.conflicting),
            "too long": len(self.too_long),
        }
        dropped = ", ".join(f"{count:,} {name}" for name, count in left_out.items() if count)
        result = [
            f"{self.source}: {self.kept:,} questions of {self.rows:,} rows (layout {self.layout})"
            + (f"; left out: {dropped}" if dropped else "")
        ]
        for name, places in (
            ("empty", self.empty),
            ("contradicting an earlier row", self.conflicting),
            ("longer than rollout.max_prompt_tokens", self.too_long),
            (f"{len(self.unmeetable):,} references that no answer can meet", self.unmeetable),
            ("files that are of no kind that is read", self.unread),
        ):
            if places:
                result.append(f"  {name}: {listed(places, _NAMED, between='; ')}")
        return result


def read_examples(config: DataConfig) -> tuple[list[Example], DataReport]:
    """Distinct examples of `config.path` in the order of the rows. See `examples_of` for errors."""
    examples, report = examples_of(read_rows(config), config)
    return examples, replace(report, unread=unread(config))


def examples_of(rows: Iterable[Row], config: DataConfig) -> tuple[list[Example], DataReport]:
    """Map the fields, and leave out blank and repeated rows (both counted).

    Raises UserError by place and field for a field that is absent or not of its kind, and where nothing is left.
    """
    fields = config.fields
    report = DataReport(config.path, "custom" if fields else config.layout)
    examples: list[Example] = []
    answers: dict[str, tuple[str, ...]] = {}
    for row in rows:
        report.rows += 1
        if row.values is None:
            report.empty.append(row.where)
            continue
        if fields is None:
            name = detect_layout(row.values) if config.layout == "auto" else config.layout
            if name is None and asks_nothing(row.values):
                report.empty.append(row.where)
                continue
            if name is None:
                raise UserError(
                    f"{row.where}: has the fields {', '.join(row.values)}, which no known layout fits "
                    f"({', '.join(LAYOUTS)}); set question (a list of messages: messages) and "
                    "answer in task.data.fields, or of an evaluation in data.fields of its entry in evaluation.sets"
                )
            fields, report.layout = LAYOUTS[name], name
        example = _example(row.where, row.values, fields)
        if not example.question.strip() or not example.answer.strip():
            report.empty.append(row.where)
            continue
        asked = json.dumps([[message["role"], message["content"].strip()] for message in example.messages])
        if asked in answers:
            if answers[asked] == (example.answer, *example.also_accepted):
                report.duplicates += 1
            else:
                report.conflicting.append(row.where)
            continue
        answers[asked] = (example.answer, *example.also_accepted)
        examples.append(example)
    if not examples:
        raise UserError(f"{config.path}: holds no question with an answer in {report.rows} rows")
    report.kept = len(examples)
    return examples, report


def _example(where: str, row: Mapping[str, Any], fields: FieldMap) -> Example:
    if fields.messages is not None:
        messages = _messages(_required(row, fields.messages, where), f"{where}: {fields.messages}")
    else:
        assert fields.question is not None
        value = _required(row, fields.question, where, blank="")
        if isinstance(value, list) and value and isinstance(value[0], Mapping) and "role" in value[0]:
            raise UserError(
                f"{where}: {fields.question}: holds messages; name it in fields.messages, not fields.question"
            )
        question = _text(value, f"{where}: {fields.question}")
        messages = ({"role": "user", "content": question},)
    answer, *others = _answers(where, row, fields)
    return Example(where, messages, answer, tuple(others), row)


def _answers(where: str, row: Mapping[str, Any], fields: FieldMap) -> list[str]:
    """One reference, or all that a list gives."""
    if fields.answer is not None and look_up(row, fields.answer) is not ABSENT:
        value = look_up(row, fields.answer)
        given = value if isinstance(value, list) and value else [value]
        texts = [_text(one, f"{where}: {fields.answer}") for one in given]
        return [text for text in texts if text.strip()] or [""]
    if fields.solution is None or look_up(row, fields.solution) is ABSENT:
        return [_text(_required(row, fields.answer or fields.solution or "", where, blank=""), where)]
    solution = _text(look_up(row, fields.solution), f"{where}: {fields.solution}")
    answer = boxed_answer(solution)
    if answer is None:
        raise UserError(f"{where}: the {fields.solution} holds no \\boxed{{...}} to read the answer from")
    return [answer]


def _required(row: Mapping[str, Any], path: str, where: str, blank: Any = None) -> Any:
    """The value; `blank` where the field is there but null. Raises UserError where the field is not there."""
    value = look_up(row, path)
    if value is not ABSENT:
        return value
    if blank is not None and has_null(row, path):
        return blank
    raise UserError(f"{where}: has no field {path}; it has {', '.join(row)}")


def _messages(value: Any, where: str) -> tuple[Mapping[str, str], ...]:
    well_formed = isinstance(value, Sequence) and not isinstance(value, str) and len(value) > 0
    if well_formed:
        well_formed = all(
            isinstance(m, Mapping) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str)
            for m in value
        )
    if not well_formed:
        raise UserError(f"{where}: must be messages [{{role, content}}, ...], not {value!r:.80}")
    if value[-1]["role"] != "user":
        raise UserError(f"{where}: the last message must be the user's, not {value[-1]['role']!r}")
    return tuple({"role": _encodable(m["role"], where), "content": _encodable(m["content"], where)} for m in value)


def _text(value: Any, where: str) -> str:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: must be text or a number, not {type(value).__name__} {value!r:.60}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: must be text or a number, not {value} (a blank cell of a table?)")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    try:
        text = str(value)
    except ValueError:  # Python writes no integer of more than 4,300 digits
        raise UserError(f"{where}: is a number of too many digits; write it as text") from None
    return _encodable(text, where)


def _encodable(text: str, where: str) -> str:
    """Half of a surrogate pair (`"\\ud83d"` in JSON) is no character: no tokenizer takes it, no file holds it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: holds half of a surrogate pair at character {error.start + 1}; write the whole character"
        ) from None
    return text
