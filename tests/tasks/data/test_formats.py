"""Every format gives the same examples; published layouts work as they are; what is broken is named by its place."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megatron_dppo.errors import UserError
from megatron_dppo.tasks.data.config import DataConfig, FieldMap
from megatron_dppo.tasks.data.examples import boxed_answer, read_examples

ROWS = [{"problem": f"What is {i} + 1?", "answer": str(i + 1), "level": i} for i in range(5)]
# The columns of BytedTsinghua-SIA/DAPO-Math-17k, with its prompt's wording.
DAPO = [
    {
        "data_source": "math_dapo",
        "prompt": [
            {
                "content": "Solve the following math problem step by step. The last line of your response should be of "
                f"the form Answer: $Answer.\n\nFind {i}.\n\nRemember to put your answer on its own line.",
                "role": "user",
            }
        ],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(i), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{i}"},
    }
    for i in range(3)
]
# One problem of the MATH archive: a file of its own, the answer only inside the solution.
MATH = {
    "problem": "What is $\\frac{1}{2}$ of $x^{2}$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "First \\boxed{wrong}, then half of it: $\\boxed{\\frac{x^{2}}{2}}.$",
}


def write_jsonl(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    return path


def write_saved(path: Path, rows: list) -> Path:
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows), "test": datasets.Dataset.from_list(rows[:1])}
                         ).save_to_disk(str(path))  # fmt: skip
    return path


def write_json(path: Path, rows: list) -> Path:
    path.write_text(json.dumps(rows, indent=1))
    return path


WRITERS = {"q.jsonl": write_jsonl, "q.parquet": write_parquet, "saved": write_saved, "q.json": write_json}


def read(path: Path, **settings):
    return read_examples(DataConfig(path=str(path), **settings))


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("rows", [ROWS, DAPO], ids=["math", "dapo"])
def test_every_format_gives_the_same_examples(tmp_path, name, rows):
    examples, report = read(WRITERS[name](tmp_path / name, rows))
    reference, _ = read(write_jsonl(tmp_path / "reference.jsonl", rows))
    assert [(e.messages, e.answer) for e in examples] == [(e.messages, e.answer) for e in reference]
    assert report.rows == report.kept == len(rows)
    assert examples[1].metadata == rows[1]


def test_splits_of_a_saved_dataset(tmp_path):
    path = write_saved(tmp_path / "saved", ROWS)
    assert len(read(path, split="test")[0]) == 1
    with pytest.raises(UserError, match=r"has no split 'dev'; it has train, test"):
        read(path, split="dev")


def test_a_dataset_loaded_by_the_hub_code_path(tmp_path, monkeypatch):
    """`load_dataset` reads a local repository exactly as it reads one from the hub."""
    repository = tmp_path / "someone" / "sums"
    repository.mkdir(parents=True)
    write_parquet(repository / "train-00000-of-00001.parquet", ROWS)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from megatron_dppo.tasks.data import rows as rows_module

    read_rows = list(rows_module._hub(DataConfig(path=str(repository))))
    assert [row.values for row in read_rows] == ROWS
    assert read_rows[2].where.endswith("sums, row 3")


def test_a_dataset_that_is_not_there(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"^no-one/no-such-dataset: neither a file here nor a dataset"):
        read_examples(DataConfig(path="no-one/no-such-dataset"))


def test_dapo_layout_keeps_the_messages_and_the_nested_answer(tmp_path):
    examples, report = read(write_parquet(tmp_path / "dapo.parquet", DAPO))
    assert report.layout == "dapo-math"
    assert examples[2].answer == "2"
    assert examples[2].messages == ({"role": "user", "content": DAPO[2]["prompt"][0]["content"]},)
    assert examples[2].question == DAPO[2]["prompt"][0]["content"]


def test_math_archive_one_file_per_problem(tmp_path):
    for kind, number in (("geometry", 2), ("algebra", 1)):
        (tmp_path / kind).mkdir()
        problem = MATH | {"problem": f"{kind} {number}"}
        (tmp_path / kind / f"{number}.json").write_text(json.dumps(problem))
    examples, report = read(tmp_path)
    assert report.layout == "math"
    assert [e.question for e in examples] == ["algebra 1", "geometry 2"]
    assert [e.answer for e in examples] == ["\\frac{x^{2}}{2}"] * 2


@pytest.mark.parametrize(
    "row",
    [
        {"ID": "2024-I-1", "Problem": "Find x.", "Solution": "204", "Answer": 204},  # Maxwell-Jia/AIME_2024
        {"id": 60, "problem": "Find x.", "solution": "\\boxed{204}", "answer": "204"},  # HuggingFaceH4/aime_2024
        {"question": "Find x.", "answer": "204"},  # opencompass/AIME2025
    ],
)
def test_aime_files(tmp_path, row):
    examples, _ = read(write_jsonl(tmp_path / "aime.jsonl", [row]))
    assert [(e.question, e.answer) for e in examples] == [("Find x.", "204")]


def test_a_field_map_reaches_into_rows(tmp_path):
    rows = [{"turns": [{"text": f"Q{i}"}], "meta": {"gold": i + 0.5}} for i in range(2)]
    fields = FieldMap(question="absent|turns.0.text", answer="meta.gold")
    examples, report = read(write_jsonl(tmp_path / "own.jsonl", rows), fields=fields)
    assert [(e.question, e.answer) for e in examples] == [("Q0", "0.5"), ("Q1", "1.5")]
    assert report.layout == "custom"


def test_duplicates_and_empty_rows_are_reported(tmp_path):
    path = tmp_path / "dirty.jsonl"
    lines = [
        json.dumps(ROWS[0]),
        "",
        json.dumps(ROWS[0]),
        json.dumps(ROWS[0] | {"answer": "7"}),
        json.dumps({"problem": "  ", "answer": "1"}),
        json.dumps({"problem": "Q", "answer": None, "solution": None}),
        json.dumps(ROWS[1]),
    ]
    path.write_text("\n".join(lines) + "\n")
    examples, report = read(path)
    assert [e.answer for e in examples] == ["1", "2"]
    assert (report.rows, report.kept, report.duplicates) == (7, 2, 1)
    assert report.empty == [f"{path}, line {n}" for n in (2, 5, 6)]
    assert report.conflicting == [f"{path}, line 4"]
    text = "\n".join(report.lines())
    assert "2 questions of 7 rows" in text
    assert "1 duplicates, 3 empty, 1 contradicting an earlier row" in text
    assert f"{path}, line 4" in text


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"problem": "x", "answer": ', r"line 2: not valid JSON"),
        ("[1, 2]", r"line 2: a row must be an object"),
        ('{"question": "x", "answer": "1"}', r"line 2: has no field problem; it has question, answer"),
        ('{"problem": "x"}', r"line 2: has no field answer"),
        ('{"problem": ["x"], "answer": "1"}', r"line 2: problem: must be text or a number, not list"),
        ('{"problem": "x", "answer": NaN}', r"line 2: answer: must be text or a number, not nan"),
        ('{"problem": "x", "answer": {"a": 1}}', r"line 2: answer: must be text or a number, not dict"),
        ('{"problem": "x", "solution": "no box"}', r"line 2: the solution holds no \\boxed"),
    ],
)
def test_broken_rows_are_answered_by_file_and_line(tmp_path, line, message):
    path = tmp_path / "broken.jsonl"
    path.write_text(f"{json.dumps(ROWS[0])}\n{line}\n")
    with pytest.raises(UserError, match=f"^{path}, {message}"):
        read(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": "text"}, r"row 1: has no field|row 1: prompt: must be messages"),
        ({"prompt": [{"role": "user"}]}, r"prompt: must be messages \[\{role, content\}"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, r"the last message must be the user's, not 'assistant'"),
    ],
)
def test_broken_messages(tmp_path, change, message):
    path = write_parquet(tmp_path / "dapo.parquet", [DAPO[0] | change])
    with pytest.raises(UserError, match=message):
        read(path, layout="dapo-math")


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "q.parquet").write_bytes(b"PAR1 and nothing more")
    (tmp_path / "latin.jsonl").write_bytes('{"problem": "é"}'.encode("latin-1"))
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "q.csv").write_text("a,b")
    for name, message in (
        ("q.parquet", "not a readable Parquet file"),
        ("latin.jsonl", "not UTF-8"),
        ("empty.jsonl", "holds no question with an answer in 0 rows"),
        ("absent.jsonl", "no such file or folder"),
        ("q.csv", "is none of .jsonl, .json, .parquet"),
    ):
        with pytest.raises(UserError, match=message):
            read(tmp_path / name)


def test_a_layout_that_fits_nothing_says_what_there_is(tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "Q", "label": "A"}])
    with pytest.raises(UserError, match=r"line 1: has the fields text, label, which no known layout fits"):
        read(path)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("\\boxed{1} then \\boxed{2}", "2"),
        ("\\boxed{\\frac{1}{2}}", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 9$.", "9"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{1", None),
        ("none", None),
    ],
)
def test_boxed_answer(solution, answer):
    assert boxed_answer(solution) == answer
