"""Broken Hugging Face folders: one clear line each, before anything is read into a model."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_dppo.checkpoint.hf_files import INDEX, HFFiles
from megatron_dppo.checkpoint.hf_import import check_tensors, check_tokenizer, stores_stacked_experts
from megatron_dppo.checkpoint.hf_side_files import check_side_files, copy_side_files
from megatron_dppo.cli import main
from megatron_dppo.errors import SystemFault, UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.rollout.model_facts import ModelFacts
from megatron_dppo.rollout.weight_transfer.manifest import read_shapes
from tests.system_faults import fail_to_open
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


def replaced(name: str, content: str) -> Callable[[Path], None]:
    """The fault of a file with that content."""

    def fault(folder: Path) -> None:
        (folder / name).write_text(content)

    fault.__name__ = f"{name}-{content:.24}"
    return fault


def header(described: object, *, length: int | None = None) -> Callable[[Path], None]:
    """The fault of a weight file with that header."""

    def fault(folder: Path) -> None:
        encoded = json.dumps(described).encode()
        shard(folder).write_bytes((len(encoded) if length is None else length).to_bytes(8, "little") + encoded)

    fault.__name__ = f"header-{described!r:.40}-{length}"
    return fault


def is_a_folder(folder: Path) -> None:
    file = shard(folder)
    file.unlink()
    file.mkdir()


def unreadable_config(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"model_type": "\xff"}')


def resized(name: str, size: object) -> Callable[[Path], None]:
    """The fault of a config.json with another size."""

    def fault(folder: Path) -> None:
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(content | {name: size}))

    fault.__name__ = f"{name}-{size}"
    return fault


def single_beside_the_index(folder: Path) -> None:
    save_file({"lm_head.weight": torch.zeros(300, 64)}, folder / "model.safetensors")


def no_weights(folder: Path) -> None:
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


FAULTS: dict[Callable[[Path], None], str] = {
    drop_shard: r"model-00002-of-\d+\.safetensors is missing",
    truncate: r"model-00002-of-\d+\.safetensors is no intact",
    truncate_header: r"model-00002-of-\d+\.safetensors is no intact",
    garbage: r"model-00002-of-\d+\.safetensors is no intact",
    integers: r"is stored as I8",
    extra: r"unused tensors: model\.layers\.7\.extra\.weight",
    missing: r"lacks model\.",
    reshaped: r"wrong shape: .* \(3, 5\) in place of",
    lost_from_shard: r"lacks .*which model\.safetensors\.index\.json places there",
    larger_vocabulary: r"token ids up to 300, but config\.json says vocab_size 300",
    config_vocabulary: r"\(300, 64\) in place of \(400, 64\)",
    broken_index: r"index\.json is not valid JSON",
    escaping_index: r"outside the folder",
    replaced(INDEX, "[]"): r"index\.json must hold a JSON object, found a list",
    replaced(INDEX, "{}"): r"not a safetensors index: its weight_map is no object",
    replaced(INDEX, '{"weight_map": ["a"]}'): r"not a safetensors index: its weight_map is no object",
    replaced(INDEX, '{"weight_map": {"a": 5}}'): r"places a outside the folder, in 5",
    replaced(INDEX, '{"weight_map": {"a": "\\ud83d"}}'): r"is missing, but .*index\.json names it",
    replaced(INDEX, '{"weight_map": {"a": "%s"}}' % ("x" * 300)): r"x is missing, but .*index\.json names it",
    replaced(INDEX, '{"weight_map": {"a": "x\\u0000"}}'): r"is missing, but .*index\.json names it",
    replaced(INDEX, '{"a": ' * 100_000): r"index\.json is not valid JSON: maximum recursion depth",
    replaced("tokenizer.json", "[]"): r"tokenizer\.json must hold a JSON object",
    replaced("tokenizer.json", '{"model": []}'): r"tokenizer\.json is no tokenizer",
    replaced("tokenizer.json", '{"model": {"vocab": {"a": "1"}}}'): r"tokenizer\.json is no tokenizer",
    replaced("tokenizer.json", '{"added_tokens": [1]}'): r"tokenizer\.json is no tokenizer",
    replaced("config.json", "[]"): r"config\.json must hold a JSON object",
    unreadable_config: r"config\.json is not valid JSON: 'utf-8' codec can't decode",
    header({}, length=2**60): r"model-00002-of-\d+\.safetensors is no intact",
    header({"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}): r"is no intact",
    header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [2**63, 2**63 + 4]}}): r"is no intact",
    header({"a": 5}): r"is no intact",
    header([]): r"is no intact",
    header({"a": {"dtype": "F\n32", "shape": [1], "data_offsets": [0, 4]}}): r"is no intact.*unknown variant `F 32`",
    replaced(INDEX, '{"weight_map": {"a": "x\\n\\u001b[2J.safetensors"}}'): r"x \\x1b\[2J\.safetensors is missing",
    is_a_folder: r"is missing, but",
    resized("num_hidden_layers", 10**7): r"num_hidden_layers is 10,000,000, more than 1,024",
    resized("num_experts", 10**9): r"num_experts is 1,000,000,000, more than",
    resized("vocab_size", 10**12): r"vocab_size is 1,000,000,000,000, more than",
    resized("hidden_size", 10**30): r"hidden_size is 1,000,0.*, more than",
    single_beside_the_index: r"both model\.safetensors, which transformers reads, and model\.safetensors\.index\.json",
    no_weights: r"no weights.*pytorch_model\.bin is a pickle and is not read",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_faults_are_named_in_one_line(fault: Callable[[Path], None], folder: Path) -> None:
    fault(folder)
    with pytest.raises(UserError, match=FAULTS[fault]) as refusal:
        check(folder)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("read", [check, read_shapes])
@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, UserError), (errno.ESTALE, SystemFault)])
def test_a_file_that_may_not_be_read_is_not_called_damaged(
    number: int, kind: type[Exception], read: Callable[[Path], Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_to_open(monkeypatch, "00002-of", number)
    with pytest.raises(kind, match=rf"model-00002-of-\d+\.safetensors cannot be read: {os.strerror(number)}$"):
        read(folder)


ONE_LINE = [
    resized("num_hidden_layers", 10**7),
    replaced("config.json", "[]"),
    replaced("config.json", '{"model_type": "qwen3\\n\\u001b[31m"}'),
    unreadable_config,
]


@pytest.mark.parametrize("command", [["convert", "MODEL", "OUT"], ["plan", "MODEL", "--gpus", "8"]])
@pytest.mark.parametrize("fault", ONE_LINE, ids=lambda f: f.__name__)
def test_a_command_ends_with_one_line_and_status_2(
    folder: Path, capfd: pytest.CaptureFixture[str], command: list[str], fault: Callable[[Path], None]
) -> None:
    fault(folder)
    words = {"MODEL": str(folder), "OUT": str(folder / "out")}
    assert main([words.get(word, word) for word in command]) == 2
    error = capfd.readouterr().err
    assert error.count("\n") == 1
    assert "\x1b" not in error
    assert "config.json" in error
    assert not (folder / "out").exists()


def test_sizes_of_layers_and_experts_are_bounded_together(folder: Path) -> None:
    for name, size in (("num_hidden_layers", 1000), ("num_local_experts", 10_000)):
        resized(name, size)(folder)
    with pytest.raises(UserError, match=r"num_hidden_layers 1,000 of 10,000 experts are more than 262,144 experts"):
        check(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_an_export_holds_no_file_from_outside_the_model(folder: Path, tmp_path_factory: Any, name: str) -> None:
    """Whoever made the folder would choose which of our files is published with the export."""
    elsewhere = tmp_path_factory.mktemp("home")
    secret = elsewhere / "secret"
    secret.write_text('{"token": "invented"}')
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(secret)
    target = elsewhere / "export"
    target.mkdir()
    with pytest.raises(UserError, match=rf"{name} is a link to .*secret, outside the model's folder; put a copy"):
        check_side_files(folder)
    with pytest.raises(UserError, match="outside the model's folder"):
        copy_side_files(folder, target, torch.float32)
    assert not (target / name).exists()


def test_a_snapshot_of_the_hugging_face_cache_is_exported(folder: Path, tmp_path_factory: Any) -> None:
    """Its files are links to `blobs` two folders above."""
    cache = tmp_path_factory.mktemp("cache") / "models--org--name"
    snapshot, blobs = cache / "snapshots" / "0a1b", cache / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        shutil.copyfile(file, blobs / str(number))
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(number))
    target = tmp_path_factory.mktemp("export")
    check_side_files(snapshot)
    copy_side_files(snapshot, target, torch.float32)
    assert (target / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert not (target / "tokenizer.json").is_symlink()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "[]", r"config\.json must hold a JSON object"),
        ("config.json", "{}", r"config\.json: model_type None is not supported"),
        ("generation_config.json", "7", r"generation_config\.json must hold a JSON object, found a int"),
        ("generation_config.json", "{", r"generation_config\.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": {}}', r"generation_config\.json: eos_token_id has {}"),
    ],
)
def test_what_an_engine_reads_of_a_folder_is_refused_by_name(
    folder: Path, name: str, content: str, message: str
) -> None:
    facts = ModelFacts.read(folder, router_replay=True)
    assert facts.routes is not None
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message):
        ModelFacts.read(folder, router_replay=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "many"}, "vocab_size"),
        ({"vocab_size": 0}, "vocab_size is 0"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers is 1,000,0.*, more"),
        ({"num_hidden_layers": "1" + "0" * 9}, "num_hidden_layers"),
        ({"num_hidden_layers": 1e308}, "num_hidden_layers"),
        ({"decoder_sparse_step": [1]}, "decoder_sparse_step"),
        ({"num_experts_per_tok": None}, "num_experts_per_tok"),
        ({"num_local_experts": 2**13, "num_hidden_layers": 2**10}, "8,192 experts are more than 262,144 experts"),
        ({"eos_token_id": ["</s>"]}, r"eos_token_id has '</s>', which is no token id"),
    ],
)
def test_fields_that_an_engine_cannot_read_are_refused_by_name(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(UserError, match=rf"config\.json: .*{message}") as refusal:
        ModelFacts.read(folder, router_replay=True)
    assert "\n" not in str(refusal.value)


def test_an_evaluation_may_serve_a_model_of_no_family(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text('{"model_type": "gemma3_text", "vocab_size": 9, "eos_token_id": [1, 7]}')
    facts = ModelFacts.read(folder, router_replay=False)
    assert (facts.vocab_size, facts.stop_token_ids, facts.routes) == (9, (1, 7), None)
    with pytest.raises(UserError, match="model_type 'gemma3_text' is not supported"):
        ModelFacts.read(folder, router_replay=True)
    file.write_text('{"model_type": "gemma3_text", "vocab_size": "many"}')
    with pytest.raises(UserError, match=r"config\.json: vocab_size is 'many'; it must be a whole number above 0"):
        ModelFacts.read(folder, router_replay=False)


@pytest.mark.parametrize("described", [[], {"a": 5}, {"a": {}}, {"a": {"shape": 3}}])
def test_headers_that_an_engine_reads_are_refused_by_file(folder: Path, described: object) -> None:
    header(described)(folder)
    with pytest.raises(UserError, match=r"model-00002-of-\d+\.safetensors is no intact safetensors file"):
        read_shapes(folder)
