"""`megatron-dppo evaluate` with the real vLLM on a tiny model, and how it goes on after a stop."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
from rich.console import Console

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.engine import EngineClosed
from megatron_dppo.tasks.config import TaskConfig
from megatron_dppo.tasks.data.config import DataConfig
from megatron_dppo.tasks.data_task import load_prompts
from megatron_dppo.tasks.rewards.grader import build_grader
from megatron_dppo.tasks.task import Prompt
from megatron_dppo.trainer.answers import Answer, AnswerFile
from megatron_dppo.trainer.evaluate_model import _answer_all, _keep, _scored, _settings, evaluate_config, evaluate_model
from megatron_dppo.trainer.evaluation import pass_at_k
from megatron_dppo.trainer.task_suite import EvaluationSet
from tests.rollout.uniform_engine import UniformEngine
from tests.system_faults import files_of_at_most

AIME = [{"id": i, "problem": f"Find {i}.", "answer": str(i)} for i in range(5)]
CONFIG = """
rollout: {max_prompt_tokens: 32, max_response_tokens: 6, dtype: float32, kv_cache_mib: 64, max_num_seqs: 8,
          enforce_eager: true}
task:
  rewards: [{kind: python, path: "tests.tasks.rewards.functions:even_length"}]
  reward_workers: 1
  kind: data
  data: {path: "not read here"}
optimizer: {lr: 1.0}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("evaluate")
    tokenizer = byte_tokenizer()
    write_checkpoint(path / "model", random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    (path / "aime.jsonl").write_text("".join(json.dumps(row) + "\n" for row in AIME))
    (path / "run.yaml").write_text(CONFIG)
    return path


def evaluate(folder, *more: str) -> int:
    data = [str(folder / "aime.jsonl"), f"again={folder / 'aime.jsonl'}"]
    options = ["--config", str(folder / "run.yaml"), "--out", str(folder / "out")]
    return main(["evaluate", str(folder / "model"), *data, "evaluation.samples=4", "evaluation.top_p=0.95",
                 "evaluation.temperature=0.7", *more, *options])  # fmt: skip


def test_two_sets_then_going_on(folder, capsys):
    assert evaluate(folder) == 0
    printed = capsys.readouterr().out
    assert "avg@n" in printed
    assert "evaluation set aime: " in printed
    assert "again: 5 of 5 questions" in printed
    first, again = ((folder / "out" / f"{name}.jsonl").read_text().splitlines() for name in ("aime", "again"))
    assert len(first) == 1 + 5 * 4
    # The same seeds: what is sampled anew after a stop is what would have been sampled.
    assert sorted(first) == sorted(again)
    answers = sorted((json.loads(line) for line in first[1:]), key=lambda a: (a["prompt"], a["sample"]))
    assert [(a["prompt"], a["sample"]) for a in answers] == [(i, j) for i in range(5) for j in range(4)]
    assert all(a["correct"] == (len(a["response"]) % 2 == 0) for a in answers)
    correct = np.array([a["correct"] for a in answers]).reshape(5, 4)
    summary = json.loads((folder / "out/summary.json").read_text())["aime"]
    assert 0 < summary["accuracy"] == correct.mean() < 1
    assert summary["pass@2"] == pass_at_k(correct, 2).mean()
    assert summary["accuracy_low"] <= summary["accuracy"] <= summary["accuracy_high"]

    # Nothing is missing, so no engine is started the second time; another sampling is not mixed in.
    assert evaluate(folder) == 0
    assert "questions\n" not in capsys.readouterr().out.replace("of 5 rows", "")
    assert evaluate(folder, "evaluation.temperature=1.0") == 2
    assert "holds answers of another evaluation (temperature changed)" in capsys.readouterr().err
    assert evaluate(folder, "rollout.dtype=bfloat16") == 2
    assert "holds answers of another evaluation (dtype changed)" in capsys.readouterr().err

    # Answers of earlier weights are not those of a model that was trained further and exported to the same folder.
    write_checkpoint(folder / "model", random_tiny_qwen3_moe(byte_tokenizer(), seed=2), byte_tokenizer())
    assert evaluate(folder) == 2
    assert "holds answers of another evaluation (weights changed)" in capsys.readouterr().err


@pytest.mark.full
def test_questions_that_a_model_answers_now_and_then(folder, tmp_path, capsys):
    """The kept set equals a recount; broken off in the middle and started again, it is the same file."""
    files = {}
    for name in ("whole", "killed"):
        out = tmp_path / name
        arguments = [
            "evaluate",
            str(folder / "model"),
            str(folder / "aime.jsonl"),
            "--config",
            str(folder / "run.yaml"),
        ]
        arguments += ["evaluation.samples=8", "--keep", "0.5", "0.75", "--out", str(out)]
        if name == "killed":
            command = [sys.executable, "-m", "megatron_dppo.cli", *arguments]
            process = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
            while not (out / "aime.jsonl").exists() or (out / "aime.jsonl").read_bytes().count(b"\n") < 9:
                assert process.poll() is None
                time.sleep(0.01)
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert started
            assert psutil.wait_procs(started, timeout=60)[1] == [], "the engine's core is left"
            assert not (out / "aime.kept.jsonl").exists()
        assert main(arguments) == 0
        files[name] = (out / "aime.kept.jsonl").read_text()
        answers = [json.loads(line) for line in (out / "aime.jsonl").read_text().splitlines()[1:]]
        right = Counter(a["prompt"] for a in answers if a["correct"])
        expected = [row for i, row in enumerate(AIME) if 4 <= right[i] <= 6]
        kept = [json.loads(line) for line in files[name].splitlines()]
        assert [(row["problem"], row["answer"]) for row in kept] == [(r["problem"], r["answer"]) for r in expected]
        assert f"aime: {len(kept)} of 5 questions kept" in capsys.readouterr().out
        assert 0 < len(kept) < 5
    assert files["whole"] == files["killed"]
    rows = load_prompts(TaskConfig(kind="data", data={"path": "x"}), DataConfig(path=str(out / "aime.kept.jsonl")),
                        byte_tokenizer(), 64)[0]  # fmt: skip
    assert [(prompt.question, prompt.answer) for prompt in rows] == [(row["problem"], row["answer"]) for row in kept]


def test_what_is_kept_is_put_to_the_model_as_it_was(tmp_path):
    """With its system message, its turns before, other right answers, and what a reward looks up in its row."""
    turns = [{"role": "system", "content": "Add."}, {"role": "user", "content": "Hi"}]
    turns += [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "1 + 1"}]
    rows = [
        {"prompt": turns, "reward_model": {"ground_truth": ["2", "two"]}, "level": 3},
        {"prompt": turns[:1] + turns[-1:], "reward_model": {"ground_truth": "2"}, "level": 4},
    ]
    task = TaskConfig(kind="data", data={"path": "x"}, prompt="{question} at level {metadata[level]}")

    def read(file: Path) -> list[Prompt]:
        return load_prompts(task, DataConfig(path=str(file)), byte_tokenizer(), 256)[0]

    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    one = EvaluationSet("set", read(tmp_path / "set.jsonl"), 2, grader=None)
    with closing(AnswerFile(tmp_path / "answers.jsonl", {})) as file:
        file.add(replace(answer(0, sample), correct=sample == 0) for sample in range(2))
        file.add(replace(answer(1, sample), correct=True) for sample in range(2))
        assert "set: 1 of 2 questions kept" in _keep(one, file, (0.2, 0.8))
    (kept,) = read(tmp_path / "answers.kept.jsonl")
    assert kept.text == one.prompts[0].text
    assert (kept.answer, kept.also_accepted) == ("2", ("two",))
    assert kept.metadata == {**rows[0], "pass_rate": 0.5}


def test_a_band_that_is_none(folder, capsys):
    arguments = ["evaluate", str(folder / "model"), str(folder / "aime.jsonl"), "--out", str(folder / "band")]
    assert main([*arguments, "--keep", "0.8", "0.2"]) == 2
    assert "--keep 0.8 0.2: give two fractions from 0 to 1, the smaller first" in capsys.readouterr().err


def test_several_engines_are_refused(folder, capsys):
    assert evaluate(folder, "rollout.engines=8") == 2
    assert "evaluate: rollout.engines=8, but one engine answers here; set rollout.engines=1" in capsys.readouterr().err


class SlowFirst(UniformEngine):
    """Answers its first question when the answers to eight others are on the disk, and keeps how many it was at."""

    def __init__(self, config, answers: Path) -> None:
        super().__init__(config)
        self.answers, self.lock, self.at, self.most = answers, threading.Lock(), 0, 0

    def generate(self, requests, sampling, *, training, call=""):
        number = int(requests[0].request_id.split("/")[2])
        with self.lock:
            self.at += len(requests)
            self.most = max(self.most, self.at)
        deadline = time.monotonic() + 60
        while not number and len(self.answers.read_text().splitlines()) < 1 + 8 * len(requests):
            assert time.monotonic() < deadline, "answers were kept back while one question was slow"
            time.sleep(0.01)
        batch = super().generate(requests, sampling, training=training)
        with self.lock:
            self.at -= len(requests)
        return batch


def test_no_question_waits_for_another_s_longest_answer(tmp_path):
    (tmp_path / "set.jsonl").write_text(
        "".join(json.dumps({"problem": f"{i}?", "answer": "1"}) + "\n" for i in range(9))
    )
    config = evaluate_config([str(tmp_path / "set.jsonl")], None, [
        "rollout.max_num_seqs=4", "rollout.max_response_tokens=5", "evaluation.samples=2",
        "task.rewards=[{kind: exact-match}]",
    ])  # fmt: skip
    tokenizer = byte_tokenizer()
    prompts = load_prompts(config.task, config.evaluation.sets[0].data, tokenizer, 512)[0]
    grader = build_grader(config.task, max_response_tokens=5)
    one, engine = EvaluationSet("set", prompts, 2, grader), SlowFirst(config.rollout, tmp_path / "answers.jsonl")
    with closing(AnswerFile(tmp_path / "answers.jsonl", {})) as file:
        _answer_all(engine, tokenizer, config, one, file, prompts, Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()[1:]]
    numbers = [(row["prompt"], row["sample"]) for row in rows]
    assert sorted(numbers) == [(i, j) for i in range(9) for j in range(2)]
    assert numbers[-2:] == [(0, 0), (0, 1)]
    assert len({row["response"] for row in rows}) > 1
    assert engine.most <= 8, "no more than it decodes and as many again: a request has its time"


REWARD = """
def worth(*, metadata, **_):
    if not metadata["fine"]:
        raise KeyError(metadata["problem"])
    return 1
"""
OF_CODE = "task.rewards=[{{kind: python, path: '{}/mine.py:worth', when: {{kind: code}}}}, {{kind: exact-match}}]"


@pytest.mark.parametrize("fine", [(False, True, True), (True, True, False), (False, False, True)])
def test_a_question_that_a_reward_fails_on_ends_no_evaluation(tmp_path, monkeypatch, fine):
    """Two that it fails on do, where it scored none, and their answers are not kept: they are no zeros."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [{"problem": f"{i}?", "answer": "1", "fine": one} for i, one in enumerate(fine)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = evaluate_config([str(tmp_path / "set.jsonl")], None, [
        "rollout.max_num_seqs=2", "rollout.max_response_tokens=5", "evaluation.samples=2",
        f"task.rewards=[{{kind: python, path: '{tmp_path}/mine.py:worth'}}]", "task.reward_workers=1",
    ])  # fmt: skip
    scored: list[int] = []

    def counted(*given):
        answers = _scored(*given)
        scored.append(len(answers))
        return answers

    class OneByOne(UniformEngine):
        """Each question comes when those before it are scored."""

        def generate(self, requests, sampling, *, training, call=""):
            while len(scored) < int(requests[0].request_id.split("/")[2]):
                time.sleep(0.01)
            return super().generate(requests, sampling, training=training)

    monkeypatch.setattr("megatron_dppo.trainer.evaluate_model._scored", counted)
    prompts = load_prompts(config.task, config.evaluation.sets[0].data, byte_tokenizer(), 512)[0]
    one = EvaluationSet("set", prompts, 2, build_grader(config.task, max_response_tokens=5))
    ends, path = not any(fine[:2]), tmp_path / "answers.jsonl"
    so = pytest.raises(UserError, match="failed on all 4 responses to 2 questions") if ends else nullcontext()
    with closing(one.grader), closing(AnswerFile(path, {})) as file, so:
        _answer_all(OneByOne(config.rollout), byte_tokenizer(), config, one, file, prompts, Console(quiet=True))
    scored.extend([0] * 3)  # nobody waits any more
    answers = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    expected = [] if ends else [one for one in fine for _ in range(2)]
    assert [row["correct"] for row in answers] == expected


class DiesAt(UniformEngine):
    """Dies at a question, when the answers to others are there."""

    def __init__(self, config, question: int, others_there: Callable[[], bool]) -> None:
        super().__init__(config)
        self.question, self.others_there = question, others_there

    def generate(self, requests, sampling, *, training, call=""):
        if int(requests[0].request_id.split("/")[2]) == self.question:
            deadline = time.monotonic() + 60
            while not self.others_there():
                assert time.monotonic() < deadline, "answers were kept back"
                time.sleep(0.01)
            raise EngineClosed("the engine died")
        return super().generate(requests, sampling, training=training)


def test_one_question_that_a_rare_reward_fails_on_keeps_no_other_s_answers_back(tmp_path):
    """Of a set of sums with one bad program among them: the sums are on the disk when the engine dies."""
    (tmp_path / "mine.py").write_text(REWARD)
    rows = [{"problem": f"{i}?", "answer": "1", "kind": "sum" if i else "code", "fine": False} for i in range(10)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = evaluate_config([str(tmp_path / "set.jsonl")], None, [
        "rollout.max_num_seqs=2", "rollout.max_response_tokens=5", "evaluation.samples=2", "task.reward_workers=1",
        OF_CODE.format(tmp_path),
    ])  # fmt: skip
    prompts = load_prompts(config.task, config.evaluation.sets[0].data, byte_tokenizer(), 512)[0]
    one = EvaluationSet("set", prompts, 2, build_grader(config.task, max_response_tokens=5))
    said, path = io.StringIO(), tmp_path / "answers.jsonl"

    def written() -> list[int]:
        return [json.loads(line)["prompt"] for line in path.read_text().splitlines()[1:]]

    engine = DiesAt(config.rollout, 9, lambda: len(written()) == 2 * 8)
    with closing(one.grader), closing(AnswerFile(path, {})) as file, pytest.raises(EngineClosed):
        _answer_all(engine, byte_tokenizer(), config, one, file, prompts, Console(file=said))
    assert sorted(written()) == [number for number in range(1, 9) for _ in range(2)]
    assert said.getvalue().splitlines()[-1] == "set: 8 of 10 questions"


@pytest.mark.parametrize(("there", "code"), [("sum", 2), ("code", 0)])
def test_an_evaluation_of_which_two_bad_rows_are_left_comes_to_its_end(tmp_path, capsys, there, code):
    """Where their function scored answers that are on the disk; those of another say nothing of it."""
    write_checkpoint(tmp_path / "model", random_tiny_qwen3_moe(byte_tokenizer(), seed=1), byte_tokenizer())
    (tmp_path / "mine.py").write_text(REWARD)
    kinds = [there, "code", "code"]
    rows = [{"problem": f"{i}?", "answer": "1", "kind": kind, "fine": False} for i, kind in enumerate(kinds)]
    (tmp_path / "set.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        "rollout.engine=tests.rollout.uniform_engine:make", "rollout.max_response_tokens=5", "evaluation.samples=2",
        OF_CODE.format(tmp_path),
        "task.reward_workers=1", "task.date=2026-01-01",
    ]  # fmt: skip
    config = evaluate_config([str(tmp_path / "set.jsonl")], None, overrides)
    prompts = load_prompts(config.task, config.evaluation.sets[0].data, byte_tokenizer(), 512)[0]
    settings = _settings(tmp_path / "model", config, EvaluationSet("set", prompts, 2, grader=None))
    with closing(AnswerFile(tmp_path / "out/set.jsonl", settings)) as file:
        file.add(answer(0, sample) for sample in range(2))
    arguments = ["evaluate", str(tmp_path / "model"), str(tmp_path / "set.jsonl"), "--out", str(tmp_path / "out")]
    assert main([*arguments, *overrides]) == code
    printed = capsys.readouterr()
    if code:
        assert "the reward python failed on all 4 responses to 2 questions" in printed.err
    else:
        assert json.loads((tmp_path / "out/summary.json").read_text())["set"]["accuracy"] == pytest.approx(1 / 3)


def answer(prompt: int, sample: int) -> Answer:
    return Answer(
        prompt=prompt, sample=sample, correct=True, well_formed=True, tokens=3, finish_reason="stop", response="ä\n"
    )


def test_a_torn_line_is_dropped_and_written_again(tmp_path):
    path = tmp_path / "set.jsonl"
    with closing(AnswerFile(path, {"seed": 0})) as file:
        file.add(answer(0, j) for j in range(2))
        file.add(answer(1, j) for j in range(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    with closing(AnswerFile(path, {"seed": 0})) as file:
        assert file.has(0, 2)
        assert not file.has(1, 2)
        file.add([answer(1, 1)])
        assert file.answers(1, 2) == [replace(answer(1, j), response="") for j in range(2)]
    assert path.read_bytes() == whole
    path.write_bytes(whole + bytes(4096) + b'"tokens": 3}\n')  # as a power cut may leave the next answers
    with closing(AnswerFile(path, {"seed": 0})) as file:
        assert file.has(1, 2)
    assert path.read_bytes() == whole


def test_a_file_without_an_answer_is_begun_anew(tmp_path):
    """An evaluation that ended before its first answer leaves one, and starts again with settings that were mended."""
    path = tmp_path / "set.jsonl"
    AnswerFile(path, {"seed": 0}).close()
    with closing(AnswerFile(path, {"seed": 1})) as file:
        file.add([answer(0, 0)])
    assert json.loads(path.read_text().splitlines()[0]) == {"settings": {"seed": 1}}
    with pytest.raises(UserError, match=r"another evaluation \(seed changed\)"):
        AnswerFile(path, {"seed": 0})


def test_a_full_disk_is_named_and_costs_no_answer_before(tmp_path):
    path = tmp_path / "set.jsonl"

    def add() -> None:
        with files_of_at_most(200), closing(AnswerFile(path, {"seed": 0})) as file:
            file.add([answer(0, 0)])
            file.add([answer(1, 0)])

    with pytest.raises(UserError, match=r"set\.jsonl: cannot be written: File too large"):
        add()
    with closing(AnswerFile(path, {"seed": 0})) as file:
        assert (file.has(0, 1), file.has(1, 1)) == (True, False)


REWARDS_OF_BEFORE = [
    {"name": None, "weight": 1.0, "kind": "verifier", "sandbox": "full", "timeout_s": 10.0},
    {"name": None, "weight": 1.0, "kind": "math-verify", "boxed_only": False, "precision": 6, "timeout_s": 5},
    {"name": None, "weight": 1.0, "kind": "exact-match", "ignore_case": False},
    {"name": None, "weight": 1.0, "kind": "format", "pattern": "x"},
    {"name": None, "weight": 1.0, "kind": "overlong", "buffer_tokens": 1, "max_response_tokens": None},
    {"name": None, "weight": 1.0, "kind": "python", "path": "m:f", "timeout_s": 10.0, "bounds": [-100.0, 100.0],
     "sandbox": "full", "environment": []},
]  # fmt: skip
"""As files of answers have them that were begun when no reward had a `when`."""


def test_an_evaluation_that_was_begun_before_a_setting_was_there_goes_on(tmp_path):
    def settings(**changed):
        rewards = [{**REWARDS_OF_BEFORE[0], **changed}, *REWARDS_OF_BEFORE[1:]]
        config = evaluate_config(["x.jsonl"], None, [f"task.rewards={json.dumps(rewards)}"])
        return _settings(tmp_path, config, EvaluationSet("set", [], 1, grader=None))

    path = tmp_path / "set.jsonl"
    with closing(AnswerFile(path, settings() | {"rewards": REWARDS_OF_BEFORE})) as file:
        file.add([answer(0, 0)])
    with closing(AnswerFile(path, settings())) as file:
        assert file.has(0, 1)
    for changed in ({"when": {"source": "sums"}}, {"weight": 2.0}):
        with pytest.raises(UserError, match=r"another evaluation \(rewards changed\)"):
            AnswerFile(path, settings(**changed))


def test_a_model_that_changed_since_its_export_is_not_evaluated(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (model / name).write_text("{}")
    write_checksums(model, mark="config.json")
    (model / "tokenizer.json").write_text("[]")
    config = evaluate_config(["q.jsonl"], None, [])
    with pytest.raises(UserError, match=r"tokenizer\.json is damaged, or of another folder"):
        evaluate_model(model, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_answer_of_another_evaluation_with_other_fields(tmp_path):
    """What changed is said before what its answers lack."""
    path = tmp_path / "set.jsonl"
    path.write_text('{"settings": {"seed": 1}}\n{"prompt": 0, "sample": 0, "reward": 0.5}\n')
    with pytest.raises(UserError, match=r"another evaluation \(seed changed\)"):
        AnswerFile(path, {"seed": 0})
    with pytest.raises(UserError, match=r"set\.jsonl, line 2: not an answer of an evaluation: TypeError"):
        AnswerFile(path, {"seed": 1})


def test_files_that_are_something_else(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=r"x\.jsonl, line 1: not an answer of an evaluation"):
        AnswerFile(tmp_path / "x.jsonl", {})


def test_the_papers_sampling_is_the_default(tmp_path):
    config = evaluate_config(["aime24=a.jsonl", "some/AIME 2025.parquet"], None, ["seed=3"])
    assert (config.evaluation.temperature, config.evaluation.top_p, config.evaluation.samples) == (0.7, 0.95, 32)
    assert [(one.name, one.data.path) for one in config.evaluation.sets] == [
        ("aime24", "a.jsonl"),
        ("AIME_2025", "some/AIME 2025.parquet"),
    ]
    assert config.seed == 3
    partitioned = evaluate_config(["a=data/year=2025/x.jsonl", "data/year=2025/y.jsonl"], None, [])
    assert [(one.name, one.data.path) for one in partitioned.evaluation.sets] == [
        ("a", "data/year=2025/x.jsonl"),
        ("y", "data/year=2025/y.jsonl"),
    ]
    with pytest.raises(UserError, match="name a file of questions"):
        evaluate_config([], None, [])
    (file := tmp_path / "run.yaml").write_text("rollout: 3\n")
    with pytest.raises(UserError, match=r"config key rollout of .*run\.yaml must be a section .* not 3"):
        evaluate_config(["a.jsonl"], file, [])
    file.write_text("evaluation: {sets: 7}\n")
    with pytest.raises(UserError, match=r"evaluation\.sets"):
        evaluate_config([], file, [])


def test_a_model_that_is_not_there(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path), "x.jsonl"]) == 2
    assert "holds no Hugging Face model" in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["vllm", "reference"])
def test_answers_longer_than_the_models_positions(folder, tmp_path, capsys, engine):
    data = str(folder / "aime.jsonl")
    assert main(["evaluate", str(folder / "model"), data, "-o", str(tmp_path), f"rollout.engine={engine}"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("lower rollout.max_response_tokens")
