"""`doctor --parity` with the real vLLM and Megatron-Core, each in a type of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from megatron_dppo.cli import main
from megatron_dppo.doctor.parity import Comparison, parity_config, with_layers
from megatron_dppo.doctor.parity_report import _worst, summarise
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.trainer.mismatch import Mismatch
from tests.tiny import tiny_model, tiny_qwen3_moe

ROOT = str(Path(__file__).resolve().parents[2])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_qwen3_moe(folder, seed=1)
    return folder


def compared(
    model: Path, out: Path, *arguments: str, prompts: int
) -> tuple[dict[str, dict[str, dict[str, float]]], str]:
    """What `doctor --parity` writes and prints; the prompts are the defaults, sums under the tokenizer's template."""
    command = [
        *(str(Path(sys.executable).with_name("megatron-dppo")), "doctor", "--parity", str(model), "-o", str(out)),
        *(*arguments, "rollout.max_response_tokens=24", "rollout.kv_cache_mib=64", "rollout.max_prompt_tokens=128"),
        *(f"trainer.prompts_per_step={prompts}", f"trainer.prompts_per_mini_batch={prompts}"),
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT, "COLUMNS": "200"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return json.loads((out / "parity.json").read_text()), done.stdout


def test_replay_cuts_the_worst_gap_of_a_bf16_engine(model: Path, tmp_path: Path) -> None:
    """A bf16 engine and a float32 trainer."""
    out = tmp_path / "parity"
    numbers, printed = compared(model, out, "--precision", "bfloat16/float32", "--reference", prompts=32)
    assert "…" not in printed, "a figure is cut off"
    passes = numbers["bfloat16/float32"]
    on, off = passes["on"], passes["off"]
    assert on["tokens"] == off["tokens"] > 1000
    assert off["routed_otherwise"] > 20, "bf16 changed no routes: the case is too easy"
    assert off["logp_max"] > 3 * on["logp_max"]
    engine, trainer = passes["engine, transformers"], passes["trainer, transformers"]
    assert engine["routed_otherwise"] == pytest.approx(off["routed_otherwise"], abs=2)  # both are float32 and live
    assert trainer["logp_max"] > 0.01, "R3 holds the trainer to experts that float32 would not have chosen"
    for row in (on, off, engine, trainer):
        assert 0 < row["logp_mean"] < row["logp_p99"] < row["logp_max"]
        assert 0 < row["prob_mean"] < row["prob_p99"] < row["prob_max"] < 1
    pixels = np.asarray(Image.open(out / "parity.png").convert("RGB")).astype(int)
    assert (pixels.max(axis=2) - pixels.min(axis=2) > 40).mean() > 0.005
    lines = printed.splitlines()
    assert (
        sum(line.count("bfloat16/float32") for line in lines) == 4 + 8
    )  # two passes, two beside transformers, eight tokens that differ most
    worst = [line for line in lines if line.count('"') >= 4]
    assert len(worst) == 8
    mu, pi = (float(part) for part in worst[0].replace("│", " ").split()[1:3])
    assert abs(mu - pi) == pytest.approx(on["prob_max"], abs=2e-6)


@pytest.mark.full
def test_both_sides_draw_the_same_weights_for_shapes_alone(model: Path, tmp_path: Path) -> None:
    """A folder without weights, two of its four layers, weights as a bf16 checkpoint holds them."""
    shapes, out = tmp_path / "shapes", tmp_path / "parity"
    shutil.copytree(model, shapes, ignore=shutil.ignore_patterns("*.safetensors"))
    described = json.loads((shapes / "config.json").read_text())
    # Logits of random weights are all alike unless these are large.
    (shapes / "config.json").write_text(json.dumps(described | {"dtype": "bfloat16", "initializer_range": 0.2}))
    arguments = ("--random-weights", "--layers", "2", "--precision", "float32", "--reference", "run.seed=3")
    numbers, _ = compared(shapes, out, *arguments, prompts=4)
    made = json.loads((out / "2-layers" / "config.json").read_text())
    assert (made["num_hidden_layers"], described["num_hidden_layers"]) == (2, 4)
    assert len(numbers["float32"]) == 4
    for row in numbers["float32"].values():
        assert row["tokens"] > 100
        assert 0 < row["logp_max"] < 1e-4
        assert row["prob_max"] > 1e-9


def test_the_numbers_are_those_of_the_definition() -> None:
    mu, pi, live = np.array([0.5, 0.25, 0.9]), np.array([0.5, 0.5, 0.8]), np.array([0.1, 0.25, 0.9])
    logs = [np.log(one).astype(np.float32) for one in (mu, pi, live)]
    whole = np.arange(3)
    of_experts = summarise(Comparison(Mismatch(*logs), whole, whole, whole, differing_tokens=4.0))
    assert of_experts["on"]["logp_max"] == pytest.approx(np.log(2), rel=1e-6)
    assert of_experts["on"]["prob_mean"] == pytest.approx((0 + 0.25 + 0.1) / 3, rel=1e-6)
    assert of_experts["on"]["prob_p50"] == pytest.approx(0.1, rel=1e-6)
    assert of_experts["on"]["prob_p99"] == pytest.approx(np.quantile([0, 0.25, 0.1], 0.99), rel=1e-6)
    assert of_experts["off"]["logp_max"] == pytest.approx(np.log(5), rel=1e-6)
    assert of_experts["off"]["routed_otherwise"] == 4
    dense = summarise(Comparison(Mismatch(logs[0], logs[1], logs[1]), whole, whole, whole, differing_tokens=None))
    assert list(dense) == ["-"]


def test_a_token_that_several_answers_have_is_listed_once(model: Path, tmp_path: Path) -> None:
    log_mu = np.log(np.array([0.5, 0.5, 0.25], np.float32))
    sequence, position = np.array([0, 1, 0]), np.array([3, 3, 4])
    one = Comparison(
        Mismatch(log_mu, log_mu + 0.1, log_mu), np.array([5, 5, 6]), sequence, position, differing_tokens=None
    )
    batch = SimpleNamespace(token_ids=np.tile([1, 2, 3, 5, 6], 2), offsets=np.array([0, 5, 10]))
    table = _worst(parity_config(model, None, [], tmp_path), {"float32": one}, {"float32": batch})
    assert list(table.columns[1].cells) == ["0.500000", "0.250000"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--precision", "float8"],
            "--precision float8: must be one of float32, bfloat16, float16, or EN",
        ),
        (["--layers", "2"], "--layers goes with --random-weights"),
        (["rollout.quantization=fp8", "--precision", "float32"], "--precision float32 with rollout.quantization=fp8"),
        (["--random-weights", "--layers", "5"], "--layers 5: "),
        (["rollout.max_respons_tokens=3"], "did you mean rollout.max_response_tokens?"),
        (["rollout.router_replay=false"], "records no routes to replay"),
        (["parallel.tensor=2", "parallel.sequence_parallel=true"], "world size 1 is not a multiple"),
        (["-o", __file__], "cannot be written: File exists; choose another folder"),  # before an engine is started
    ],
)
def test_bad_arguments(model: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["doctor", "--parity", str(model), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_configuration_gives_layout_and_lengths(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run: {{dir: /nowhere, seed: 5}}\nmodel: {{path: {tmp_path}}}\nrollout: {{max_prompt_tokens: 77}}\n"
    )
    config = parity_config(model, file, ["trainer.samples_per_prompt=2"], tmp_path / "out")
    assert (config.model.path, config.run.dir, config.run.seed) == (model, tmp_path / "out", 5)
    assert (config.rollout.max_prompt_tokens, config.trainer.samples_per_prompt) == (77, 2)


def test_a_section_that_is_none_is_named(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run: 5\n")
    with pytest.raises(UserError, match=r"config key run of .*run\.yaml must be a section .* not 5"):
        parity_config(model, file, [], tmp_path / "out")


def test_shapes_with_fewer_layers(model: Path, tmp_path: Path) -> None:
    folder = with_layers(model, 3, tmp_path / "out" / "shapes")
    assert load_hf_config(folder).layers == 3
    assert {file.name for file in folder.iterdir()} >= {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert not list(folder.glob("*.safetensors"))
    before = (folder / "config.json").stat().st_mtime_ns
    assert with_layers(model, 3, folder) == folder  # another rank
    assert (folder / "config.json").stat().st_mtime_ns == before
    tiny_model("qwen3", dense := tmp_path / "dense")
    assert len(json.loads((dense / "config.json").read_text())["layer_types"]) == 4
    assert load_hf_config(with_layers(dense, 2, tmp_path / "out" / "two")).layers == 2
    tiny_model("qwen3_5", seeing := tmp_path / "seeing")
    assert load_hf_config(with_layers(seeing, 3, tmp_path / "out" / "three")).layers == 3
    config = parity_config(folder, None, [], tmp_path / "out", random_weights=True)
    assert config.model.random_weights


def test_options_without_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    for option in (["--precision", "float32"], ["--random-weights"], ["--layers", "2"], ["--reference"]):
        assert main(["doctor", *option]) == 2
        assert "belong to --parity MODEL" in capsys.readouterr().err
