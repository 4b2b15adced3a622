"""The conversion command: there and back under different layouts, verified, and refused with one line."""

import argparse
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.convert_arguments import add_convert_arguments, run_convert
from megatron_dppo.errors import UserError
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.peft_adapters import LORA, write_adapter
from tests.tiny import tiny_model, tiny_qwen3_moe

ROOT = Path(__file__).parents[2]


def parsed(*arguments: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_convert_arguments(parser)
    return parser.parse_args([str(a) for a in arguments])


def convert(rank: int, *arguments: object) -> str:
    try:
        run_convert(parsed(*arguments))
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "moe"
    tiny_qwen3_moe(path, seed=8, num_hidden_layers=2)
    return path


def test_there_and_back_under_torchrun_layouts(source: Path, tmp_path: Path) -> None:
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    there = run_ranks(convert, 2, source, megatron, "--tensor", 2, "--expert", 2, "--verify")
    assert there == ["", ""]
    assert (megatron / "latest").read_text() == "step_00000000\n"
    assert run_ranks(convert, 2, megatron, back, "--pipeline", 2, "--verify") == ["", ""]
    original, written = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)

    assert "is not empty" in run_ranks(convert, 1, megatron, back)[0]
    assert run_ranks(convert, 1, megatron, back, "--overwrite", "--dtype", "bfloat16") == [""]
    assert load_file(back / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_numbers_of_a_head_and_experts_biases_lie_in_a_state(tmp_path: Path) -> None:
    """Of attention's sinks each rank has those of its heads, of experts' biases each rank all of its experts'."""
    source, state, back = tmp_path / "source", tmp_path / "state", tmp_path / "back"
    tiny_model("gpt_oss", source, seed=8, num_hidden_layers=2)
    assert run_ranks(convert, 2, source, state, "--tensor", 2, "--expert", 2, "--verify") == ["", ""]
    assert run_ranks(convert, 2, state, back, "--pipeline", 2, "--verify") == ["", ""]
    original, written = load_file(source / "model.safetensors"), load_file(back / "model.safetensors")
    assert original.keys() == written.keys()
    assert all(torch.equal(written[name], original[name]) for name in original)
    assert len(original["model.layers.0.self_attn.sinks"].unique()) == 4


def test_a_damaged_state_is_not_converted_and_an_older_one_is_named(source: Path, tmp_path: Path) -> None:
    megatron, out = tmp_path / "megatron", tmp_path / "out"
    assert run_ranks(convert, 1, source, megatron) == [""]
    shutil.copytree(megatron / "step_00000000", megatron / "step_00000002")
    data = megatron / "step_00000002" / "__0_0.distcp"
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    refusal = run_ranks(convert, 1, megatron / "step_00000002", out)[0]
    assert f"{data} is damaged" in refusal
    assert f"name {megatron / 'step_00000000'} in its place" in refusal
    assert not out.exists()


def load(rank: int, folder: Path) -> str:
    try:
        build_from(folder, {})
    except UserError as error:
        return str(error)
    return ""


def test_a_model_with_a_flipped_bit_is_neither_converted_nor_loaded(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "copy")
    write_checksums(copy, mark="config.json")
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last ^ 1]))
    for said in (*run_ranks(convert, 2, copy, tmp_path / "out"), *run_ranks(load, 2, copy)):
        assert "model.safetensors is damaged" in said
    assert not (tmp_path / "out").exists()


def test_what_float16_cannot_hold_is_refused_unless_asked_for(tmp_path: Path) -> None:
    """Both ways: from a folder, and from a state of float32."""
    source, megatron, back = tmp_path / "source", tmp_path / "megatron", tmp_path / "back"
    tiny_qwen3_moe(source, seed=8, num_hidden_layers=1)
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    tensors[name][5, 7] = 1e5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    refusal = f"{name} has 1 numbers of"
    (found,) = run_ranks(convert, 1, source, tmp_path / "half", "--dtype", "float16")
    assert refusal in found
    assert not (tmp_path / "half").exists()
    assert run_ranks(convert, 1, source, megatron) == [""]
    for reason in run_ranks(convert, 2, megatron, back, "--dtype", "float16", "--pipeline", 1, "--expert", 2):
        assert refusal in reason
    assert not back.exists()
    assert run_ranks(convert, 1, megatron, back, "--dtype", "float16", "--allow-inf") == [""]
    written = load_file(back / "model.safetensors")[name]
    assert written.isinf().sum() == 1
    assert written[5, 7] == torch.inf


def test_numbers_that_are_none_are_refused_by_their_tensor(tmp_path: Path) -> None:
    """Engines would fail one after another, and nobody would name it. Infinity may be asked for."""
    tiny_qwen3_moe(tmp_path / "source", num_hidden_layers=1)
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    for number, said, refused in ((math.nan, "NaN", True), (-math.inf, "infinite", False)):
        tensors[name][5, 7] = number
        save_file(tensors, file, metadata={"format": "pt"})
        out = tmp_path / said
        assert run_ranks(convert, 1, tmp_path / "source", out) == [
            f"{name} has numbers that are {said}; get the file anew"
        ]
        (found,) = run_ranks(convert, 1, tmp_path / "source", out, "--allow-inf")
        assert (said in found) is refused


def test_the_scripts_run_in_one_process_and_in_their_direction_alone(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}

    def run(script: str, *arguments: Path) -> tuple[int, str]:
        command = [sys.executable, f"tools/{script}.py", *map(str, arguments)]
        done = subprocess.run(command, cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stderr.replace("\n", "")

    status, said = run("convert_hf_to_megatron", source, tmp_path / "out")
    assert status == 0, said
    assert "parameters in 69 tensors" in said
    assert f"done: {tmp_path / 'out' / 'step_00000000'}" in said
    status, said = run("convert_megatron_to_hf", tmp_path / "out", tmp_path / "back")
    assert status == 0, said
    assert (tmp_path / "back/config.json").is_file()
    monkeypatch.setattr("sys.argv", ["", str(source), str(tmp_path / "none")])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(ROOT / "tools/convert_megatron_to_hf.py"), run_name="__main__")
    assert "already; choose another format" in capsys.readouterr().err


def test_refusals_name_what_is_wrong(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--tensor=0", "--shard-gb=0", "--shard-gb=-1", "--shard-gb=nan", "--shard-gb=inf"):
        with pytest.raises(SystemExit) as refused:
            parsed(source, tmp_path / "out", option)
        assert refused.value.code == 2
        name, _, value = option.partition("=")
        assert re.search(rf"argument {name}: .*{value}", capsys.readouterr().err)
    (tmp_path / "empty").mkdir()
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    refusals = {
        "does not exist": (tmp_path / "absent", tmp_path / "out"),
        "step_... folder)); name another": (tmp_path / "empty", tmp_path / "out"),
        "its checkpoints/ may be meant": (tmp_path / "run", tmp_path / "out"),
        "8 experts cannot be divided": (source, tmp_path / "out", "--expert", 3),
    }
    for why, arguments in refusals.items():
        world_size = 3 if "--expert" in arguments else 1
        assert why in run_ranks(convert, world_size, *arguments)[0]
    assert not (tmp_path / "out").exists()


def test_what_is_read_is_never_overwritten(source: Path, tmp_path: Path) -> None:
    kept = {file: file.read_bytes() for file in source.iterdir()}
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(UserError, match=r"is or holds .* which is read"):
        run_convert(parsed(source, tmp_path / "link", "--overwrite"))
    (source.parent / "config.json").write_text("{}")  # so that it passes for a checkpoint's folder
    with pytest.raises(UserError, match=r"is or holds .* which is read"):
        run_convert(parsed(source, source.parent, "--overwrite"))
    (source.parent / "config.json").unlink()
    assert {file: file.read_bytes() for file in source.iterdir()} == kept


def test_a_conversion_that_fails_leaves_what_it_was_to_replace(source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert run_ranks(convert, 1, source, output) == [""]
    assert "8 experts cannot be divided" in run_ranks(convert, 3, source, output, "--expert", 3, "--overwrite")[0]
    assert (output / "step_00000000" / "state.json").is_file()
    assert run_ranks(convert, 1, source, output, "--overwrite", "--verify") == [""]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_only_checkpoints_are_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is no checkpoint folder and is not overwritten"):
        run_convert(parsed(source, tmp_path, "--overwrite"))
    assert (tmp_path / "notes.txt").read_text() == "mine"


def save_adapters(rank: int, path: Path, adapter: Path, root: Path, file: Path) -> None:
    """A state of adapters alone, and beside it the weights that they are merged into."""
    from megatron_dppo.checkpoint.peft_adapter import load_peft_adapter
    from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates
    from megatron_dppo.models.lora.attach import attach_adapters
    from megatron_dppo.models.lora.config import LoraConfig
    from megatron_dppo.models.parallel import ParallelConfig
    from tests.rollout.lora_ranks import export_merged

    export_merged(rank, path, {}, adapter, file)
    models, model, groups = build_from(path, {}, params_dtype=torch.float32)
    lora = LoraConfig(**LORA)
    attach_adapters(models, model, groups, lora)
    load_peft_adapter(models, model, lora, adapter)
    trainee = Trainee(model=model, models=models, groups=groups, parallel=ParallelConfig(), lora=lora)
    TrainingStates(root, trainee).save(3, {})


@pytest.mark.full
def test_a_state_of_adapters_becomes_the_merged_model(source: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32))
    run_ranks(save_adapters, 1, source, tmp_path / "adapter", tmp_path / "states", tmp_path / "right.safetensors")
    assert (
        "name the model that they were trained on with --base"
        in run_ranks(convert, 1, tmp_path / "states", tmp_path / "out")[0]
    )
    arguments = (tmp_path / "states", tmp_path / "out", "--base", source, "--verify", "--tensor", 2)
    assert run_ranks(convert, 2, *arguments) == ["", ""]
    right, written = load_file(tmp_path / "right.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert right.keys() == written.keys()
    for name, tensor in right.items():
        torch.testing.assert_close(written[name], tensor, atol=1e-6, rtol=0)
