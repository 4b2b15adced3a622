"""Hugging Face folders: every stored form is imported, what is written is whole, and what fails leaves nothing."""

import hashlib
import json
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_dppo.checkpoint.hf_files import INDEX
from tests.checkpoint.save_ranks import (
    SHARD_BYTES,
    import_and_save,
    import_from,
    load_refusal,
    save_and_die,
    save_with_little_room,
    save_with_unreadable_config,
)
from tests.distributed import run_ranks
from tests.tiny import tiny_qwen3_moe

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "moe"
    tiny_qwen3_moe(path, seed=5, num_hidden_layers=2)
    return path


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def test_written_folder_is_what_transformers_reads(source: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    run_ranks(import_and_save, 2, TP2_EP2, source, [first, second])
    for file in first.iterdir():  # deterministic: the same bytes twice
        digests = {hashlib.sha256((folder / file.name).read_bytes()).hexdigest() for folder in (first, second)}
        assert len(digests) == 1, file.name

    placed = json.loads((first / INDEX).read_text())
    assert placed["metadata"]["total_size"] == sum(t.nbytes for t in tensors_of(first).values())
    assert len(set(placed["weight_map"].values())) > 2
    assert max(f.stat().st_size for f in first.glob("*.safetensors")) < SHARD_BYTES + 20_000
    original, written = tensors_of(source), tensors_of(first)
    assert written.keys() == original.keys() == placed["weight_map"].keys()
    assert all(torch.equal(written[name], original[name]) for name in original)

    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (first / name).read_bytes() == (source / name).read_bytes()
    ids = torch.arange(40)[None]
    logits = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32)(ids).logits for f in (source, first)]
    assert torch.equal(*logits)
    chat = [{"role": "user", "content": "2 + 2"}]
    assert AutoTokenizer.from_pretrained(first).apply_chat_template(chat, tokenize=False).endswith("assistant:")


def test_dtype_of_the_result(source: Path, tmp_path: Path) -> None:
    run_ranks(import_and_save, 1, {}, source, [tmp_path / "half"], torch.bfloat16)
    original, written = tensors_of(source), tensors_of(tmp_path / "half")
    assert all(torch.equal(written[name], original[name].bfloat16()) for name in original)
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"


def test_every_stored_form_gives_the_same_weights(source: Path, tmp_path: Path) -> None:
    """Stacked experts, several files, half precision, and each dtype of the model."""
    original = tensors_of(source)
    others = []
    for dtype in (torch.bfloat16, torch.float16):
        folder = copy_without_weights(source, tmp_path / str(dtype))
        save_file({k: v.to(dtype) for k, v in original.items()}, folder / "model.safetensors")
        others.append((folder, dtype))

    stacked_folder = copy_without_weights(source, tmp_path / "stacked")
    stacked = {k: v for k, v in original.items() if ".experts." not in k}
    for layer in range(2):
        experts = [f"model.layers.{layer}.mlp.experts.{e}" for e in range(8)]
        gate_up = [torch.cat([original[f"{e}.gate_proj.weight"], original[f"{e}.up_proj.weight"]]) for e in experts]
        down = [original[f"{e}.down_proj.weight"] for e in experts]
        stacked[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
        stacked[f"model.layers.{layer}.mlp.experts.down_proj"] = torch.stack(down)
    save_file(stacked, stacked_folder / "model.safetensors")
    others.append((stacked_folder, torch.float32))

    sharded = tmp_path / "sharded"
    tiny_qwen3_moe(sharded, seed=5, num_hidden_layers=2, max_shard_size="150KB")
    others.append((sharded, torch.float32))

    layout = {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True}
    for equal in run_ranks(import_from, 2, layout, source, others):
        assert equal == [True] * len(others)


def copy_without_weights(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def test_a_file_that_cannot_grow_fails_every_rank_and_leaves_nothing(source: Path, tmp_path: Path) -> None:
    errors = run_ranks(save_with_little_room, 2, source, tmp_path / "out", 100_000)
    assert errors[0] == errors[1]
    assert "cannot write" in errors[0]
    assert "nothing was left there" in errors[0]
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_fails_is_no_fault_of_the_user(source: Path, tmp_path: Path) -> None:
    reason = f"{source}/config.json cannot be read: Input/output error"
    said = f"SystemFault: cannot write {tmp_path}/out: {reason}; nothing was left there"
    assert run_ranks(save_with_unreadable_config, 2, source, tmp_path / "out") == [said] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_beforehand(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small tmpfs is not permitted here: {mounted.stderr.strip()}")
    try:
        errors = run_ranks(save_with_little_room, 2, source, disk / "out", None)
        assert errors[0] == errors[1]
        assert "make room" in errors[0]
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_killed_export_leaves_no_folder_that_looks_whole(source: Path, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="exit codes"):
        run_ranks(save_and_die, 1, source, tmp_path / "out")
    (leftover,) = tmp_path.iterdir()
    assert leftover.name.startswith(".out.incomplete-")
    assert not (leftover / "config.json").exists()
    run_ranks(import_and_save, 1, {}, source, [tmp_path / "out"])  # and does not stand in the way
    assert tensors_of(tmp_path / "out").keys() == tensors_of(source).keys()


def test_an_export_that_changed_is_refused_by_file_on_every_rank(source: Path, tmp_path: Path) -> None:
    """Whichever rank read the file; without its checksums the folder is as any other's."""
    export = tmp_path / "export"
    run_ranks(import_and_save, 2, TP2_EP2, source, [export])
    assert run_ranks(load_refusal, 2, TP2_EP2, export) == ["", ""]
    weights = sorted(export.glob("*.safetensors"))
    for file in (*weights[:2], export / "config.json", export / "tokenizer.json", export / INDEX):
        whole = file.read_bytes()
        file.write_bytes(whole[:-9] + bytes([whole[-9] ^ 1]) + whole[-8:])
        refusals = run_ranks(load_refusal, 2, TP2_EP2, export)
        file.write_bytes(whole)
        assert refusals[0] == refusals[1]
        assert str(file) in refusals[0]
    (export / "chat_template.jinja").write_text("{{ messages }}")
    assert "chat_template.jinja is damaged" in run_ranks(load_refusal, 1, {}, export)[0]
    assert "remove checksums.xxh128 if you changed a file" in run_ranks(load_refusal, 1, {}, export)[0]
    (export / "checksums.xxh128").unlink()
    assert run_ranks(load_refusal, 1, {}, export) == [""]
