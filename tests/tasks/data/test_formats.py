"""Every format gives the same examples; published layouts work as they are; what is broken is named by its place."""

from __future__ import annotations

import gzip
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


WRITERS = {
    "q.jsonl": write_jsonl,
    "q.parquet": write_parquet,
    "saved": write_saved,
    "q.json": write_json,
    "lines.json": write_jsonl,
}


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


def test_plain_rows_are_called_so(tmp_path):
    _, report = read(write_jsonl(tmp_path / "own.jsonl", [{"question": "2 + 2", "answer": "4"}]))
    assert report.layout == "question-answer"


def test_messages_are_sent_to_their_field(tmp_path):
    file = write_jsonl(tmp_path / "own.jsonl", [{"prompt": [{"role": "user", "content": "2 + 2"}], "label": "4"}])
    with pytest.raises(
        UserError, match=r"set question \(a list of messages: messages\) and answer in task\.data\.fields"
    ):
        read(file)
    with pytest.raises(
        UserError, match=r"line 1: prompt: holds messages; name it in fields\.messages, not fields\.que"
    ):
        read(file, fields=FieldMap(question="prompt", answer="label"))
    examples, _ = read(file, fields=FieldMap(messages="prompt", answer="label"))
    assert [(e.question, e.answer) for e in examples] == [("2 + 2", "4")]


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
        json.dumps(ROWS[0] | {"problem": ROWS[0]["problem"] + "\n"}),  # or it could be held out and trained on
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
        ('{"problem": "x", "answer": ["1", {"a": 1}]}', r"line 2: answer: must be text or a number, not dict"),
        ('{"problem": "x", "answer": {"a": 1}}', r"line 2: answer: must be text or a number, not dict"),
        (
            '{"problem": "x", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}",
            r"line 2: not valid JSON: nested too deep",
        ),
        ('{"problem": "x", "answer": ' + "9" * 5000 + "}", r"line 2: not valid JSON: Exceeds the limit"),
        (
            '{"problem": "smile \\ud83d", "answer": "1"}',
            r"line 2: problem: holds half of a surrogate pair at character 7",
        ),
        ('{"problem": "x", "answer": "\\udc00"}', r"line 2: answer: holds half of a surrogate pair at character 1"),
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
        ("q.csv", "is none of .jsonl, .jsonl.gz, .jsonl.zst, .json,"),
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


@pytest.mark.parametrize("field", ["answer", "problem"])
def test_a_null_in_the_first_row_is_a_blank_row_as_anywhere(tmp_path, field):
    rows = [ROWS[0] | {field: None}, ROWS[1], ROWS[2] | {field: None}]
    examples, report = read(write_jsonl(tmp_path / "q.jsonl", rows))
    assert [example.answer for example in examples] == ["2"]
    assert report.empty == [f"{tmp_path / 'q.jsonl'}, line {n}" for n in (1, 3)]


@pytest.mark.parametrize(
    ("names", "split", "chosen"),
    [
        (["test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"], "train", [1, 2]),
        (["test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"], "test", [0]),
        (["math_dev", "math_train"], "validation", [0]),
        (["math_dev", "math_train"], "dev", [0]),
        (["test/algebra", "train/algebra"], "train", [1]),
        (["test/train_tracks", "train/latest"], "train", [0, 1]),
        (["algebra", "geometry"], "train", [0, 1]),
        (["algebra", "train"], "train", [1]),
        ([".ipynb_checkpoints/a", "b", ".c"], "train", [1]),
        (["contest", "trainer"], "test", [0, 1]),
        (["hard", "train"], "hard", [0]),
    ],
)
def test_files_of_a_folder_by_the_split_in_their_names(tmp_path, names, split, chosen):
    for number, name in enumerate(names):
        file = tmp_path / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        write_jsonl(file, [{"problem": str(number), "answer": "1"}])
    assert [int(example.question) for example in read(tmp_path, split=split)[0]] == chosen


def test_files_of_a_folder_that_are_not_read_are_named(tmp_path):
    row = '{"question": "%s", "answer": "1"}\n'
    for name, question in (("a.jsonl", "a"), ("b.JSONL", "b")):
        (tmp_path / name).write_text(row % question)
    (tmp_path / "c.Json.GZ").write_bytes(gzip.compress((row % "c").encode()))
    for name in ("d.csv", "README.md", "LICENSE", "load.py", ".e.csv", "deep/f.arrow"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("question,answer\nd,1\n")
    examples, report = read_examples(DataConfig(path=str(tmp_path)))
    assert [example.question for example in examples] == ["a", "b", "c"]
    assert report.unread == [str(tmp_path / "d.csv"), str(tmp_path / "deep/f.arrow")]
    assert "files that are of no kind that is read: " + "; ".join(report.unread) in "\n".join(report.lines())


def test_a_split_that_no_file_has(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    with pytest.raises(
        UserError, match=r"has no file of the split 'test', by their names it has train; set data.split"
    ):
        read(tmp_path, split="test")


@pytest.mark.parametrize("compression", ["gzip", "zstd"])
@pytest.mark.parametrize("kind", ["jsonl", "json"])
def test_compressed_files_and_a_byte_order_mark(tmp_path, compression, kind):
    plain = {"jsonl": write_jsonl, "json": write_json}[kind](tmp_path / "plain", ROWS)
    path = tmp_path / f"q.{kind}.{ {'gzip': 'gz', 'zstd': 'zst'}[compression] }"
    with pa.output_stream(str(path), compression=compression) as stream:
        stream.write(b"\xef\xbb\xbf" + plain.read_bytes())
    assert [example.question for example in read(path)[0]] == [row["problem"] for row in ROWS]
    assert len(read(tmp_path)[0]) == len(ROWS)  # a folder takes it too
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(UserError, match=rf"^{path}(: cannot be read|, line|: not valid|: holds no)"):
        read(path)
    path.write_bytes(b"not compressed")
    with pytest.raises(UserError, match=rf"^{path}: cannot be read"):
        read(path)


@pytest.mark.parametrize("name", ["q.jsonl", "q.parquet"])
def test_a_list_of_accepted_answers(tmp_path, name):
    rows = [{"problem": "x", "answer": ["1/2", "0.5", " "]}, {"problem": "y", "answer": ["7"]}]
    examples, _ = read(WRITERS[name](tmp_path / name, rows))
    assert [(e.answer, e.also_accepted) for e in examples] == [("1/2", ("0.5",)), ("7", ())]


def test_an_empty_list_of_answers_is_a_blank_row(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [ROWS[0], {"problem": "x", "answer": [""]}])
    assert read(path)[1].empty == [f"{path}, line 2"]
