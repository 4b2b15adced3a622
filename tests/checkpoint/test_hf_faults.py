"""Broken Hugging Face folders: one clear line each, before anything is read into a model."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint.hf_files import INDEX, HFFiles
from megatron_dppo.checkpoint.hf_import import check_tensors, check_tokenizer, stores_stacked_experts
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from tests.tiny import tiny_model


def check(folder: Path) -> None:
    """What every import does before it reads a tensor."""
    model = load_hf_config(folder)
    files = HFFiles(folder)
    check_tensors(files, model, stores_stacked_experts(files, model))
    check_tokenizer(folder, model)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_model("qwen3_moe", tmp_path, num_hidden_layers=2, max_shard_size="150KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path)
    return tmp_path


def shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[1]


def drop_shard(folder: Path) -> None:
    shard(folder).unlink()


def truncate(folder: Path) -> None:
    data = shard(folder).read_bytes()
    shard(folder).write_bytes(data[: len(data) // 2])


def truncate_header(folder: Path) -> None:
    shard(folder).write_bytes(shard(folder).read_bytes()[:20])


def garbage(folder: Path) -> None:
    shard(folder).write_bytes(b"not a safetensors file at all")


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = shard(folder)
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != file.name} | dict.fromkeys(
        tensors, file.name
    )
    (folder / INDEX).write_text(json.dumps(index))


def swap_dtype(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({(k := min(t)): t[k].to(torch.bfloat16)}))


def integers(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({(k := min(t)): t[k].to(torch.int8)}))


def extra(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({"model.layers.7.extra.weight": torch.zeros(2)}))


def missing(folder: Path) -> None:
    def drop_first(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[min(tensors)]

    rewrite(folder, drop_first)


def reshaped(folder: Path) -> None:
    rewrite(folder, lambda t: t.update({min(t): torch.zeros(3, 5)}))


def lost_from_shard(folder: Path) -> None:
    file = shard(folder)
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file)


def larger_vocabulary(folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["overflow"] = 300
    (folder / "tokenizer.json").write_text(json.dumps(content))


def config_vocabulary(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | {"vocab_size": 400}))


def broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": ')


def escaping_index(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": "../../etc/passwd"}}))


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


FAULTS: dict[Callable[[Path], None], str] = {
    drop_shard: r"model-00002-of-\d+\.safetensors is missing",
    truncate: r"model-00002-of-\d+\.safetensors is no intact",
    truncate_header: r"model-00002-of-\d+\.safetensors is no intact",
    garbage: r"model-00002-of-\d+\.safetensors is no intact",
    swap_dtype: r"is stored as torch\.bfloat16, other tensors are not",
    integers: r"is stored as I8",
    extra: r"unused tensors: model\.layers\.7\.extra\.weight",
    missing: r"lacks model\.",
    reshaped: r"wrong shape: .* \(3, 5\) in place of",
    lost_from_shard: r"lacks .*which model\.safetensors\.index\.json places there",
    larger_vocabulary: r"token ids up to 300, but config\.json says vocab_size 300",
    config_vocabulary: r"\(300, 64\) in place of \(400, 64\)",
    broken_index: r"is not a safetensors index",
    escaping_index: r"outside the folder",
    no_weights: r"no weights.*pytorch_model\.bin is a pickle and is not read",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_faults_are_named_in_one_line(fault: Callable[[Path], None], folder: Path) -> None:
    fault(folder)
    with pytest.raises(UserError, match=FAULTS[fault]) as refusal:
        check(folder)
    assert "\n" not in str(refusal.value)


def test_a_tied_model_that_stores_an_output_layer_is_refused(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    check(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    with pytest.raises(UserError, match=r"stores lm_head\.weight although .*tie_word_embeddings"):
        check(tmp_path)
