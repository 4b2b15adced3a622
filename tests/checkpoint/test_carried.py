"""What a checkpoint holds beside its model goes with it, and the routers' correction bias stays float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from tests.checkpoint.test_convert import convert, save_adapters
from tests.distributed import run_ranks
from tests.peft_adapters import write_adapter
from tests.tiny import tiny_model

BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def mtp_tensors(layer: int) -> dict[str, torch.Tensor]:
    """Some of what GLM-4.5 has there, each in a type of its own."""
    generator = torch.Generator().manual_seed(layer)
    shapes = {
        "eh_proj.weight": (64, 128),
        "enorm.weight": (64,),
        "shared_head.head.weight": (300, 64),
        "mlp.experts.0.gate_proj.weight": (32, 64),
        "mlp.gate.e_score_correction_bias": (8,),
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    drawn = {name: t if "bias" in name else t.bfloat16() for name, t in drawn.items()}
    return {f"model.layers.{layer}.{name}": tensor for name, tensor in drawn.items()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of bfloat16, with the layer after the last in a file of its own, as GLM-4.6 has it."""
    path = tmp_path_factory.mktemp("source") / "glm"
    tiny_model("glm4_moe", path, seed=8, num_hidden_layers=2, dtype=torch.bfloat16, max_shard_size="200KB")
    index = path / "model.safetensors.index.json"
    described = json.loads(index.read_text())
    further = mtp_tensors(2)
    save_file(further, path / "mtp.safetensors", metadata={"format": "pt"})
    described["weight_map"] |= dict.fromkeys(further, "mtp.safetensors")
    index.write_text(json.dumps(described))
    return path


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(
        found[name].dtype == tensor.dtype and torch.equal(found[name], tensor) for name, tensor in right.items()
    )


def test_there_and_back_to_the_bit(source: Path, tmp_path: Path) -> None:
    """Through a state whose source is gone, and through Megatron-LM's folder, which has no place for it."""
    original = tensors(source)
    assert original[BIAS].dtype == torch.float32
    assert original["lm_head.weight"].dtype == torch.bfloat16
    moved = tmp_path / "moved"
    shutil.copytree(source, moved)
    assert run_ranks(convert, 2, moved, tmp_path / "state", "--tensor", 2, "--expert", 2, "--verify") == ["", ""]
    assert run_ranks(convert, 1, moved, tmp_path / "lm", "--to", "megatron-lm") == [""]
    shutil.rmtree(moved)
    assert run_ranks(convert, 2, tmp_path / "state", tmp_path / "back", "--pipeline", 2, "--verify") == ["", ""]
    assert same(tensors(tmp_path / "back"), original)
    assert run_ranks(convert, 1, tmp_path / "lm", tmp_path / "again", "--base", source) == [""]
    assert same(tensors(tmp_path / "again"), original)


def test_another_type_is_for_the_weights_alone(source: Path, tmp_path: Path) -> None:
    assert run_ranks(convert, 1, source, tmp_path / "state") == [""]
    assert run_ranks(convert, 1, tmp_path / "state", tmp_path / "wide", "--dtype", "float32") == [""]
    right = {name: t if load_hf_config(source).carries(name) else t.float() for name, t in tensors(source).items()}
    assert same(tensors(tmp_path / "wide"), right)


def test_a_layer_that_the_config_does_not_have_is_refused(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(source, folder)
    save_file(mtp_tensors(2) | mtp_tensors(3), folder / "mtp.safetensors", metadata={"format": "pt"})
    (said,) = run_ranks(convert, 1, folder, tmp_path / "state")
    assert "has unused tensors: model.layers.3.eh_proj.weight" in said


def test_a_state_of_adapters_takes_them_from_its_base(source: Path, tmp_path: Path) -> None:
    tiny = tiny_model("glm4_moe", tmp_path / "unused", seed=8, num_hidden_layers=2)
    write_adapter(tmp_path / "adapter", tiny)
    file = tmp_path / "saved"
    run_ranks(save_adapters, 1, source, tmp_path / "adapter", tmp_path / "states", file)
    assert not list((tmp_path / "states").rglob("carried.safetensors"))
    assert run_ranks(convert, 1, tmp_path / "states", tmp_path / "merged", "--base", source) == [""]
    merged, original = tensors(tmp_path / "merged"), tensors(source)
    further = mtp_tensors(2)
    assert same({name: merged[name] for name in further}, further)
    shared = "model.layers.1.mlp.shared_experts.up_proj.weight"
    assert not torch.equal(merged[shared], original[shared])
    assert torch.equal(merged[BIAS], original[BIAS])


def test_tensors_that_a_family_names_pass_through(tmp_path: Path) -> None:
    """Qwen3-Next's further layer is `mtp.*`, of which its config.json says nothing."""
    path = tmp_path / "next"
    tiny_model("qwen3_next", path, seed=8, num_hidden_layers=2, dtype=torch.bfloat16)
    original = tensors(path)
    further = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.layers.0.input_layernorm.weight": torch.randn(64)}
    save_file(original | further, path / "model.safetensors", metadata={"format": "pt"})
    assert run_ranks(convert, 2, path, tmp_path / "state", "--tensor", 2, "--expert", 2) == ["", ""]
    assert run_ranks(convert, 1, tmp_path / "state", tmp_path / "back", "--verify") == [""]
    assert same(tensors(tmp_path / "back"), original | further)


def as_published(tensors: dict[str, torch.Tensor], model: HFConfig) -> dict[str, torch.Tensor]:
    """With the experts of a layer in one tensor, where transformers writes one each."""
    stacks: dict[str, list[torch.Tensor]] = {}
    for name, stack in model.written_in.items():
        stacks.setdefault(stack, []).append(tensors[name])
    rest = {name: tensor for name, tensor in tensors.items() if name not in model.written_in}
    return rest | {name: torch.cat(parts).view(model.stacked_tensors[name]) for name, parts in stacks.items()}


def loaded(rank: int, path: Path, states: Path, names: list[str]) -> bool:
    """Whether training in bfloat16 begins with the same weights, of a state or of the folder."""
    from megatron_dppo.checkpoint.hf_export import weight_exporter
    from megatron_dppo.checkpoint.training_state import Trainee, TrainingStates
    from megatron_dppo.models.parallel import ParallelConfig
    from tests.megatron import build_from

    models, model, groups = build_from(path, {}, params_dtype=torch.bfloat16)
    right = {
        name: tensor.clone() for name, tensor in weight_exporter(models, model, groups).stream() if tensor is not None
    }
    for chunk in models:
        for parameter in chunk.parameters():
            parameter.data.fill_(float("nan"))
    TrainingStates(states, Trainee(model=model, models=models, groups=groups, parallel=ParallelConfig())).load()
    found = {name: tensor for name, tensor in weight_exporter(models, model, groups).stream() if tensor is not None}
    return sorted(found) == names and same(found, right)


def test_a_model_that_sees_images_goes_out_whole(tmp_path: Path) -> None:
    """Qwen3.5 as it is published: stacked experts, two float32 tensors in each gated delta layer, what sees images and
    the further layer beside, settings around those of the decoder. Through a state, in files so small that a stack is
    in one of its own."""
    path = tmp_path / "seeing"
    tiny_model("qwen3_5_moe", path, seed=8, num_hidden_layers=2, dtype=torch.bfloat16)
    (path / "preprocessor_config.json").write_text('{"patch_size": 4}')
    model = load_hf_config(path)
    further = {"mtp.fc.weight": torch.randn(64, 128).bfloat16(), "mtp.layers.0.input_layernorm.weight": torch.randn(64)}
    original = as_published(tensors(path), model) | further
    assert {"model.visual.patch_embed.proj.weight", "mtp.fc.weight", *model.stacked_tensors} <= original.keys()
    for name in ("A_log", "norm.weight"):
        name = f"model.language_model.layers.0.linear_attn.{name}"
        original[name] = original[name].float() * 1.001
    save_file(original, path / "model.safetensors", metadata={"format": "pt"})
    assert run_ranks(convert, 2, path, tmp_path / "state", "--tensor", 2, "--expert", 2, "--verify") == ["", ""]
    assert run_ranks(loaded, 1, path, tmp_path / "state", sorted(model.tensors)) == [True]
    small = ("--shard-gb", "0.00003", "--verify")
    assert run_ranks(convert, 2, tmp_path / "state", tmp_path / "back", "--pipeline", 2, *small) == ["", ""]
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 4
    assert same(tensors(tmp_path / "back"), original)
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["dtype"] = "bfloat16"  # transformers leaves it at float32
    assert json.loads((tmp_path / "back/config.json").read_text()) == config
    assert (tmp_path / "back/preprocessor_config.json").read_text() == '{"patch_size": 4}'
