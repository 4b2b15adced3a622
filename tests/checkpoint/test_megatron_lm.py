"""Megatron-LM's folders: what plain Megatron-Core code writes is read, it reads what is written here, to the bit; and
what is refused."""

import io
import json
import os
import pickle
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies.torch import MCoreMetadata
from safetensors.torch import load_file

from megatron_dppo.checkpoint.megatron_files import LESS_ONE, MegatronFiles, find_iteration
from megatron_dppo.checkpoint.megatron_save import _as_megatron_lm
from megatron_dppo.checkpoint.safe_dcp import read_index
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from tests.checkpoint.megatron_ranks import Layout, convert, read_plain, read_stock, there_and_back, write_stock
from tests.distributed import run_ranks
from tests.tiny import tiny_model

DENSE = {"qwen3": {}, "qwen2": {"tie_word_embeddings": True}, "llama": {}}
MOE: dict[str, dict[str, Any]] = {"qwen3_moe": {}, "mixtral": {}}
OTHERS = {"mixed": {"mlp_only_layers": [0], "norm_topk_prob": False}, "olmoe": {}, "glm4_moe": {}, "minimax_m2": {}}
"""The plain model of these tests is none of these: a list of MoE layers, a norm over a whole projection, sigmoids."""
FURTHER: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"n_group": 1},
    "moonlight": {"q_lora_rank": None, "rope_scaling": None, "n_group": 1},
    "glm4_moe_lite": {},
    "gpt_oss": {},
    "qwen3_next": {},
    "qwen3_5_moe": {},
    "qwen3_5": {"tie_word_embeddings": True},
}
"""With latent attention, with windows and sinks, with gated delta layers."""
BY_TYPE = {"mixed": "qwen3_moe", "moonlight": "deepseek_v3"}
TP2 = ["--tensor", "2"]
TP2_EP2 = [*TP2, "--expert", "2"]
PP2 = ["--pipeline", "2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for seed, (name, overrides) in enumerate({**MOE, **DENSE, **OTHERS, **FURTHER}.items()):
        found[name] = tmp_path_factory.mktemp("models") / name
        tiny_model(BY_TYPE.get(name, name), found[name], seed, **{"num_hidden_layers": 2, **overrides})
    return found


def same(first: Path, second: Path) -> int:
    """Tensors that both folders hold with the same bits; any other fails."""
    one, other = (
        {name: tensor for file in folder.glob("*.safetensors") for name, tensor in of_each_expert(load_file(file))}
        for folder in (first, second)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) and tensor.dtype == other[name].dtype for name, tensor in one.items())
    return len(one)


def of_each_expert(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers 5 may hold the experts of a layer in one tensor."""
    for name, tensor in tensors.items():
        layer, stacked, matrix = name.partition(".mlp.experts.")
        if matrix not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        for expert, both in enumerate(tensor):
            parts = both.chunk(2) if matrix == "gate_up_proj" else (both,)
            for part, value in zip(matrix.removesuffix("_proj").split("_"), parts, strict=True):
                yield f"{layer}{stacked}{expert}.{part}_proj.weight", value


def _full(names: Any, *quick: str) -> list[Any]:
    return [name if name in quick else pytest.param(name, marks=pytest.mark.full) for name in names]


@pytest.mark.parametrize("name", _full((*MOE, *DENSE, *OTHERS), "qwen3_moe", "qwen2"))
def test_there_and_back_to_the_bit_and_plain_megatron_core_reads_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    layout = TP2 if name in DENSE else TP2_EP2
    assert run_ranks(there_and_back, 2, models[name], tmp_path, layout, PP2) == [["", ""]] * 2
    assert (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert same(models[name], tmp_path / "back") == len(load_hf_config(models[name]).tensors)
    if name not in OTHERS:
        for plain in ((1, 2, 1, 1), (2, 1, 1 if name in DENSE else 2, 1)):
            assert min(run_ranks(read_stock, 2, models[name], tmp_path / "megatron", plain)) > 5


@pytest.mark.parametrize("name", _full(FURTHER, "qwen3_next", "deepseek_v3", "gpt_oss"))
def test_other_attention_goes_there_and_back_and_plain_megatron_core_reads_it(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    layout = TP2 if name == "qwen3_5" else TP2_EP2
    assert run_ranks(there_and_back, 2, models[name], tmp_path, layout, PP2) == [["", ""]] * 2
    assert same(models[name], tmp_path / "back") >= len(load_hf_config(models[name]).tensors)  # and what sees images
    sizes = {"tensor": 2, "expert": 1 if name == "qwen3_5" else 2, "sequence_parallel": True}
    if name == "moonlight":  # which plain modules refuse without TransformerEngine
        return
    for layout in ({"pipeline": 2}, sizes):
        assert min(run_ranks(read_plain, 2, models[name], tmp_path / "megatron", layout)) > 5


@pytest.mark.parametrize(("dtype", "least"), [(torch.float32, 2.0**-29), (torch.bfloat16, 2.0**-45)])
def test_from_which_size_on_a_weight_stored_less_1_comes_back(dtype: torch.dtype, least: float) -> None:
    """Every number of the type's significand, from the least size that docs/checkpoints.md names to 16."""
    bits = {torch.float32: torch.int32, torch.bfloat16: torch.int16}[dtype]
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.arange(torch.tensor(least).log2().item(), 4, dtype=torch.float64)
    significands = 2 - torch.cat([torch.rand(500, generator=generator), torch.tensor([1.0, torch.finfo(dtype).eps])])
    plain = (sizes[:, None] * significands).to(dtype).flatten()
    plain = torch.cat([plain, -plain, torch.zeros(1, dtype=dtype)])
    near = torch.tensor([1.3e-15, -1e-16, -0.0], dtype=dtype)

    def back(weight: torch.Tensor) -> torch.Tensor:
        entry = Namespace(key=f"decoder.layers.0.{LESS_ONE}", data=weight, dtype=dtype)
        _as_megatron_lm({"norm": entry}, latent=False)
        assert entry.dtype == torch.float64
        return (entry.data + 1).to(dtype)

    assert torch.equal(back(plain).view(bits), plain.view(bits))
    assert not torch.equal(back(near).view(bits), near.view(bits))
    assert (back(near).double() - near.double()).abs().max() <= 2.0**-53


@pytest.mark.full
@pytest.mark.parametrize("name", [*MOE, *DENSE, *OTHERS, *FURTHER])
def test_the_other_way_round(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    layout = TP2 if name in (*DENSE, "qwen3_5") else TP2_EP2
    assert run_ranks(there_and_back, 2, models[name], tmp_path, PP2, layout) == [["", ""]] * 2
    assert same(models[name], tmp_path / "back") >= len(load_hf_config(models[name]).tensors)


FORMS: dict[str, dict[str, Any]] = {
    "stacked layers and experts": {"layout": (2, 1, 2, 1), "padded": 512, "optimizer": True, "te_names": True},
    "numbered layers": {"layout": (1, 2, 1, 1), "numbered": True},
    "numbered layers and experts": {"layout": (2, 1, 2, 2), "singleton": True},
    "tensor and expert parallel pipeline": {"layout": (2, 2, 2, 1), "te_names": True},
}


@pytest.mark.parametrize("name", _full(MOE, "qwen3_moe"))
@pytest.mark.parametrize("form", _full(FORMS, "stacked layers and experts"))
def test_what_plain_megatron_core_writes_is_read(form: str, name: str, models: dict[str, Path], tmp_path: Path) -> None:
    run_stock(models[name], tmp_path / "run", **FORMS[form])
    assert run_ranks(convert, 2, tmp_path / "run", tmp_path / "hf", "--base", models[name], *TP2_EP2) == ["", ""]
    assert same(models[name], tmp_path / "hf") == len(load_hf_config(models[name]).tensors)


@pytest.mark.full
@pytest.mark.parametrize("name", DENSE)
def test_what_plain_megatron_core_writes_of_a_dense_model_is_read(
    name: str, models: dict[str, Path], tmp_path: Path
) -> None:
    run_stock(models[name], tmp_path / "run", (2, 2, 1, 1))
    folder = tmp_path / "run" / "iter_0000100"  # named itself
    assert run_ranks(convert, 2, folder, tmp_path / "hf", "--base", models[name], *PP2) == ["", ""]
    assert same(models[name], tmp_path / "hf") == len(load_hf_config(models[name]).tensors)


@pytest.mark.full
def test_states_come_from_megatron_lm_and_go_there_and_logits_are_verified(
    models: dict[str, Path], tmp_path: Path
) -> None:
    moe, megatron = models["qwen3_moe"], tmp_path / "megatron"
    assert run_ranks(convert, 2, moe, megatron, "--to", "megatron-lm", "--verify", *TP2_EP2) == ["", ""]
    assert run_ranks(convert, 1, megatron, tmp_path / "state", "--base", moe, "--to", "state") == [""]
    again = tmp_path / "again"
    assert run_ranks(convert, 2, tmp_path / "state", again, "--to", "megatron-lm", *PP2) == ["", ""]
    assert run_ranks(convert, 1, again, tmp_path / "hf", "--base", moe, "--verify") == [""]
    assert same(moe, tmp_path / "hf") > 0
    half = tmp_path / "half"
    assert run_ranks(convert, 1, again, half, "--base", moe, "--dtype", "bfloat16") == [""]
    assert load_file(half / "model.safetensors")["lm_head.weight"].dtype == torch.bfloat16


def test_megatron_lm_itself_finds_the_arguments(models: dict[str, Path], tmp_path: Path) -> None:
    assert run_ranks(convert, 1, models["qwen3_moe"], tmp_path / "out", "--to", "megatron-lm") == [""]
    args = run_ranks(arguments_of, 1, tmp_path / "out")[0]
    assert (args["num_layers"], args["num_query_groups"], args["num_experts"]) == (2, 2, 8)
    assert (args["rotary_base"], args["untie_embeddings_and_output_weights"]) == (10000.0, True)


def arguments_of(rank: int, root: Path) -> dict[str, Any]:
    """By the code behind `--use-checkpoint-args`, before any process group."""
    import torch.distributed as dist
    from megatron.training.checkpointing import load_args_from_checkpoint

    dist.destroy_process_group()
    asked = Namespace(
        load=str(root),
        non_persistent_global_ckpt_dir=None,
        non_persistent_ckpt_type=None,
        exit_on_missing_checkpoint=True,
        use_tokenizer_model_from_checkpoint_args=False,
        use_mp_args_from_checkpoint_args=False,
    )
    found, _ = load_args_from_checkpoint(asked)
    result = {name: value for name, value in vars(found).items() if isinstance(value, int | float | str | None)}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return result


def run_stock(path: Path, root: Path, layout: Layout, **options: Any) -> None:
    tensor, pipeline, expert, expert_tensor = layout
    run_ranks(_write, pipeline * max(tensor, expert * expert_tensor), path, root, layout, options)


def _write(rank: int, path: Path, root: Path, layout: Layout, options: dict[str, Any]) -> None:
    write_stock(rank, path, root, layout, **options)


@pytest.fixture(scope="module")
def written(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written") / "run"
    run_stock(models["qwen3_moe"], root, (1, 1, 1, 1), numbered=True, num_query_groups=2, moe_router_topk=2)
    return root


@pytest.fixture
def run(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "run"))


class Code:
    """What a pickle would run."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return os.mkdir, (str(self.file),)


def test_code_in_pickled_parts_is_named_and_not_run(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    folder, trap = run / "iter_0000100", tmp_path / "trap"
    model = load_hf_config(models["qwen3_moe"])
    MegatronFiles(folder, model).common()
    torch.save({"args": Code(trap)}, folder / "common.pt")
    with pytest.raises(UserError, match=r"common\.pt.*posix\.mkdir has no place there"):
        MegatronFiles(folder, model).common()
    (folder / "common.pt").unlink()

    index = (folder / ".metadata").read_bytes()
    (folder / ".metadata").write_bytes(pickle.dumps(Code(trap)))
    with pytest.raises(UserError, match=r"posix\.mkdir has no place"):
        MegatronFiles(folder, model)
    (folder / ".metadata").write_bytes(index)

    files = MegatronFiles(folder, model)
    buffer = io.BytesIO()
    torch.save(Code(trap), buffer)
    code = buffer.getvalue()
    for entry, place in files._index.storage_data.items():
        if entry.fqn == "decoder.final_layernorm.weight":
            assert place.length >= len(code)
            place.length = len(code)
            with (folder / place.relative_path).open("r+b") as handle:
                handle.seek(place.offset)
                handle.write(code)
    with pytest.raises(UserError, match=r"final_layernorm\.weight is not read: posix\.mkdir has no place"):
        files.read("model.norm.weight", ((0, 64),))
    assert not trap.exists()


def test_an_index_of_megatron_core_0_15_is_read(run: Path, models: dict[str, Path]) -> None:
    folder, old = run / "iter_0000100", MCoreMetadata()
    vars(old).update(vars(read_index(folder)), mcore_data={})
    (folder / ".metadata").write_bytes(pickle.dumps(old))
    model = load_hf_config(models["qwen3_moe"])
    files = MegatronFiles(folder, model)
    norm = load_file(models["qwen3_moe"] / "model.safetensors")["model.norm.weight"]
    assert torch.equal(files.read("model.norm.weight", ((3, 9),)), norm[3:9])


def test_the_iteration_is_found_and_a_wrong_marker_named(run: Path) -> None:
    folder, marker = run / "iter_0000100", run / "latest_checkpointed_iteration.txt"
    assert find_iteration(run) == find_iteration(folder) == folder
    marker.unlink()
    assert find_iteration(run) == folder
    shutil.copytree(folder, run / "iter_0000200")
    with pytest.raises(UserError, match=r"iter_0000100, iter_0000200 and no latest_.*; name one"):
        find_iteration(run)
    for text, why in (("300", r"names iter_0000300, which is not there"), ("../x", "must hold the number")):
        marker.write_text(text)
        with pytest.raises(UserError, match=why):
            find_iteration(run)
    marker.write_text("release\n")
    (run / "iter_0000200").rename(run / "release")
    assert find_iteration(run) == run / "release"
    (run / "empty").mkdir()
    assert find_iteration(run / "empty") is None


def test_other_formats_and_other_models_are_named(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    folder, moe = run / "iter_0000100", models["qwen3_moe"]
    others = {
        "in place of": tiny(tmp_path / "wide", moe, moe_intermediate_size=48),
        "has 384 rows, vocab_size is 400": tiny(tmp_path / "words", moe, vocab_size=400),
        "lacks decoder.layers.2": tiny(tmp_path / "deep", moe, num_hidden_layers=3),
        "has what qwen3_moe has no place for: decoder.layers.1": tiny(tmp_path / "flat", moe, num_hidden_layers=1),
    }
    for why, path in others.items():
        with pytest.raises(UserError, match=why):
            MegatronFiles(folder, load_hf_config(path))
    for why, spoil in {
        "has no metadata.json": lambda: (folder / "metadata.json").unlink(),
        "'zarr'; only torch_dist": lambda: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        "--ckpt-format torch": lambda: (folder / "mp_rank_00").mkdir(),
    }.items():
        spoil()
        with pytest.raises(UserError, match=why):
            MegatronFiles(folder, load_hf_config(moe))


def tiny(path: Path, like: Path, **overrides: Any) -> Path:
    """A configuration without weights."""
    path.mkdir()
    config = json.loads((like / "config.json").read_text()) | overrides
    config.pop("layer_types", None)
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_what_shapes_do_not_tell_is_compared(run: Path, models: dict[str, Path], tmp_path: Path) -> None:
    moe, out = models["qwen3_moe"], tmp_path / "out"
    topk = tiny(tmp_path / "topk", moe, num_experts_per_tok=3)
    bridge = Path(shutil.copytree(run, tmp_path / "bridge"))
    (bridge / "iter_0000100" / "run_config.yaml").write_text("model:\n  moe_router_topk: 2\n  rotary_base: 500000\n")
    commands: list[list[object]] = [
        [run, out, "--base", topk],
        [bridge, out, "--base", moe],
        [run, out],
        [run, out, "--base", moe, "--to", "megatron-lm"],
        [run, out, "--base", moe, "--to", "state", "--verify"],
    ]
    found = run_ranks(refusals, 1, commands)[0]
    assert "moe_router_topk is 2 there, 3 here" in found[0]
    assert "rotary_base is 500000 there, 10000.0 here" in found[1]
    assert "--base HF_FOLDER" in found[2]
    assert "is a folder of Megatron-LM's already" in found[3]
    assert "neither side is one" in found[4]
    assert not out.exists()


def refusals(rank: int, commands: list[list[object]]) -> list[str]:
    return [convert(rank, *command) for command in commands]
