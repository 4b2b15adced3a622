"""What a user gets wrong is answered by one line that names it, before an engine or a process group is started."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

import pytest

from megatron_dppo.cli import main
from megatron_dppo.errors import UserError
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.start import open_engine
from tests.system_faults import failing
from tests.tiny import tiny_qwen3_moe


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(path, max_position_embeddings=32768)
    return path


@pytest.fixture
def rank_zero_of_two(monkeypatch):
    """The environment torchrun gives the first of two ranks."""
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    for name, value in (ranks | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)


@pytest.fixture
def config(tmp_path, model) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{dir: {tmp_path / 'run'}}}\nmodel: {{path: {model}}}\n"
        "parallel: {tensor: 2, expert: 2, sequence_parallel: true}\n"
    )
    return file


def one_line(capsys, arguments: list[str]) -> str:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, f"more than one line:\n{error}"
    return error


@pytest.mark.usefixtures("rank_zero_of_two")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.lrr=1", "unknown config key optimizer.lrr; did you mean optimizer.lr?"),
        ("algorithm.preset=dpo-binary-tv", "unknown preset 'dpo-binary-tv'; did you mean dppo-binary-tv"),
        ("parallel.tensor=4", "world size 2 is not a multiple of tensor x pipeline x context = 4 x 1 x 1 = 4"),
        ("parallel.expert=3", "world size 2 is not a multiple of expert_tensor x expert x pipeline = 1 x 3 x 1"),
        ("parallel.sequence_parallel=false", "with tensor > 1 needs sequence_parallel: true"),
        ("model.path=/nowhere/model", "/nowhere/model"),
        ("run.dir=/dev/null/run", "run.dir=/dev/null/run cannot be written: Not a directory"),
        (
            "trainer.resume=true",
            "checkpoints does not exist; start a run with a run.dir of its own, without trainer.resume",
        ),
        ("rollout.router_replay=false", "actor.router_replay=r3 needs the routes that rollout.router_replay=false"),
        ("actor.router_replay=r2", "replays the trainer's own routes of the pass before the update, which the preset"),
        ("task.dataset=chain_summ", "chain_sum"),
        ("actor.max_tokens_per_microbatch=17407", "set it to 17408, or actor.long_sequences=alone"),
        ("trainer.samples_per_prompt=1", "algorithm.baseline=mean: an answer has no others to compare with"),
        ("task.rewards=[{kind: python, path: 'absent.py:score'}]", "absent.py:score cannot be imported: FileNotFound"),
        ("task.held_out_size=63", "evaluation.prompts=64, but task.held_out_size=63"),
    ],
)
def test_one_line_each(capsys, config, override, message):
    assert message in one_line(capsys, ["train", str(config), override])


@pytest.mark.usefixtures("rank_zero_of_two")
def test_top_k_that_the_preset_does_not_use(capsys, config):
    overrides = ["algorithm.preset=dppo-topk-kl", "rollout.top_k_logprobs=10"]
    assert "the top 20 tokens, but rollout.top_k_logprobs=10" in one_line(capsys, ["train", str(config), *overrides])


@pytest.mark.usefixtures("rank_zero_of_two")
@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no tokenizer (none of tokenizer.json"),
        ({"tokenizer.json": "{}"}, "has no tokenizer that loads"),
        (  # as Kimi-K2 and Moonlight
            {
                "tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["tokenization_x.TikTokenTokenizer", null]}}',
                "tokenization_x.py": "raise SystemExit",
                "tiktoken.model": "IQ== 0",
            },
            "has its tokenizer as code alone (auto_map of tokenizer_config.json), which is not run",
        ),
    ],
)
def test_a_tokenizer_that_is_not_there(capsys, config, tmp_path, model, files, message):
    """transformers would make one that turns every text into no tokens at all."""
    shutil.copytree(model, tmp_path / "copy")
    for file in (tmp_path / "copy").glob("*token*"):
        file.unlink()
    for name, content in files.items():
        (tmp_path / "copy" / name).write_text(content)
    (tmp_path / "q.jsonl").write_text('{"problem": "1 + 1", "answer": "2"}\n')
    assert message in one_line(capsys, ["train", str(config), f"model.path={tmp_path / 'copy'}"])
    assert message in one_line(capsys, ["evaluate", str(tmp_path / "copy"), str(tmp_path / "q.jsonl")])


@pytest.mark.usefixtures("rank_zero_of_two")
def test_corrupt_weights(capsys, config, tmp_path):
    tiny_qwen3_moe(tmp_path / "broken", max_position_embeddings=32768)
    file = tmp_path / "broken/model.safetensors"
    file.write_bytes(file.read_bytes()[:100_000])
    capsys.readouterr()
    assert str(file) in one_line(capsys, ["train", str(config), f"model.path={tmp_path / 'broken'}"])


@pytest.mark.usefixtures("rank_zero_of_two")
def test_resume_from_an_empty_folder(capsys, config, tmp_path):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    assert "holds no checkpoint" in one_line(capsys, ["train", str(config), "trainer.resume=true"])


@pytest.mark.usefixtures("rank_zero_of_two")
def test_a_folder_that_holds_a_run_is_not_overwritten(capsys, config, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 1}\n')
    assert "already holds the metrics of a run" in one_line(capsys, ["train", str(config)])
    assert (tmp_path / "run/metrics.jsonl").read_text() == '{"step": 1}\n'


def test_without_torchrun(capsys, config, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "start training with torchrun" in one_line(capsys, ["train", str(config)])


def test_a_missing_config(capsys, tmp_path):
    assert "does not exist" in one_line(capsys, ["train", str(tmp_path / "none.yaml")])


@pytest.mark.usefixtures("rank_zero_of_two")
def test_shared_memory_that_cannot_be_written(capsys, config, model, monkeypatch):
    """Of a rank, and of an engine, which may be on another node. Else it is 180 lines, and minutes later."""
    monkeypatch.setattr(tempfile, "TemporaryFile", failing(errno.EROFS))
    why = "/dev/shm cannot be written: Read-only file system; mount a tmpfs of that size"
    assert why in one_line(capsys, ["train", str(config)])
    with pytest.raises(UserError, match=why):
        open_engine(model, RolloutConfig())
