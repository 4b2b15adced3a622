"""Adapters before any training: frozen base, step 0 to the bit, the grouped product, PEFT folders, merging."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from megatron_dppo.checkpoint.checksums import write_checksums
from megatron_dppo.checkpoint.peft_adapter import check_peft_adapter
from megatron_dppo.errors import SystemFault, UserError
from megatron_dppo.models.experts.grouped import GroupedLinear
from megatron_dppo.models.experts.module import _line_up, _one_launch
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.models.live import Owned
from megatron_dppo.models.lora.adapter import LoraAdapter, Sharding
from megatron_dppo.models.lora.attach import _add_output
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.sites import LocalSite, Site, adapter_tensors
from megatron_dppo.models.names import Piece
from tests.distributed import run_ranks
from tests.models.lora_ranks import CONFIG, PACKS, attach_and_look, first_adapters, logits_and_folder
from tests.models.test_experts import Grouped
from tests.peft_adapters import LORA, by_projection, with_peft, write_adapter
from tests.system_faults import fail_to_open
from tests.tiny import SEEING, tiny_model, tiny_qwen3_moe

TP2_EP2 = {"tensor": 2, "expert": 2, "sequence_parallel": True}


def test_step_0_merging_and_the_folder(tmp_path: Path) -> None:
    tiny = tiny_qwen3_moe(tmp_path / "model", dtype=torch.bfloat16, mlp_only_layers=[1])
    write_adapter(tmp_path / "adapter", tiny, dtype=torch.bfloat16)
    results = run_ranks(attach_and_look, 2, tmp_path / "model", TP2_EP2, tmp_path / "adapter", tmp_path / "saved")
    for found in results:
        assert found["step_0"]
        assert found["trained"]
        assert all(name.split(".")[-2] == "lora" for name in found["trained"])
    found = results[0]
    assert found["merged_at_0"]
    assert found["hundred"]
    assert found["in buckets"].keys() == found["once"].keys()
    for name, tensor in found["once"].items():
        np.testing.assert_array_equal(found["in buckets"][name], tensor, err_msg=name)
    assert found["changed"] == 4 * 4 + 3 + 3 * 8 * 3
    for name, tensor in found["first"].items():
        bound = tensor.shape[1] ** -0.5
        inside = np.abs(tensor).max() <= bound and tensor.std() == pytest.approx(bound / 3**0.5, rel=0.2)
        assert (tensor == 0).all() if "lora_B" in name else inside, name
    original = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    assert saved.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(saved[name], tensor), name


def test_the_first_a_is_the_same_in_every_layout(tmp_path: Path) -> None:
    tiny_qwen3_moe(tmp_path)
    one = run_ranks(first_adapters, 1, tmp_path, {})[0]
    two = run_ranks(first_adapters, 2, tmp_path, {"tensor": 2, "expert_tensor": 2, "sequence_parallel": True})[0]
    assert one.keys() == two.keys()
    for name, tensor in one.items():
        np.testing.assert_array_equal(two[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "family", ["qwen3_moe", "mixtral", *(pytest.param(f, marks=pytest.mark.full) for f in ("olmoe", "qwen2"))]
)
def test_there_and_back_through_peft(tmp_path: Path, family: str) -> None:
    """Our folder, loaded by PEFT, saved by PEFT (experts stacked), loaded here, saved here: the same bits."""
    tiny = tiny_model(family, tmp_path / "model")
    write_adapter(tmp_path / "ours", tiny)
    adapted = with_peft(tiny, tmp_path / "ours", dtype=torch.float32)
    adapted.save_pretrained(tmp_path / "peft")
    stored = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    assert any("experts.base_layer" in name for name in stored) == (family != "qwen2")
    layout = {"tensor": 2, "sequence_parallel": True}
    results = run_ranks(logits_and_folder, 2, tmp_path / "model", layout, tmp_path / "peft", tmp_path / "again")
    original, again = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ours", "again"))
    assert again.keys() == original.keys()
    for name, tensor in original.items():
        assert torch.equal(again[name], tensor), name
    state = {name: p.detach().numpy() for name, p in with_peft(tiny, tmp_path / "again", dtype=torch.float32)
             .get_base_model().named_parameters() if "lora_" in name}  # fmt: skip
    for name, tensor in original.items():
        np.testing.assert_array_equal(by_projection(state, name), tensor.numpy(), err_msg=name)
    with torch.no_grad():
        right = torch.cat([adapted(part[None]).logits[0] for ids, n in PACKS for part in ids.split(n)]).numpy()
    logits = np.concatenate(results, axis=-1)[:, : right.shape[1]]
    np.testing.assert_allclose(logits, right, atol=2e-5, rtol=0)


def test_one_a_for_gate_and_up_is_read_as_two(tmp_path: Path) -> None:
    """As PEFT trains experts itself: one adapter of the stacked parameter."""
    tiny = tiny_qwen3_moe(tmp_path / "model")
    targets = {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
    settings = peft.LoraConfig(
        r=4, lora_alpha=10, target_parameters=["experts.gate_up_proj", "experts.down_proj"], **targets
    )
    adapted = peft.get_peft_model(tiny, settings)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    adapted.save_pretrained(tmp_path / "peft")
    (logits,) = run_ranks(logits_and_folder, 1, tmp_path / "model", {}, tmp_path / "peft", tmp_path / "again")
    with torch.no_grad():
        right = torch.cat([adapted(part[None]).logits[0] for ids, n in PACKS for part in ids.split(n)]).numpy()
    np.testing.assert_allclose(logits[:, : right.shape[1]], right, atol=2e-5, rtol=0)
    with pytest.raises(UserError, match=r"r is 4, lora\.rank is 2"):
        check_peft_adapter(tmp_path / "peft", load_hf_config(tmp_path / "model"), LoraConfig(rank=2, alpha=10))


@pytest.mark.parametrize(
    ("family", "left_out"),
    [("qwen3_next", {"mlp.shared_expert"}), ("qwen3_5", set()), ("qwen3_5_moe", {"mlp.experts"})],
)
def test_what_peft_alone_applies_of_gated_delta_layers_and_experts(
    tmp_path: Path, family: str, left_out: set[str]
) -> None:
    """As docs/lora.md has it; of the whole model where that sees images too."""
    tiny = tiny_model(family, tmp_path / "model", num_hidden_layers=2)
    write_adapter(tmp_path / "ours", tiny)
    stored = load_file(tmp_path / "ours" / "adapter_model.safetensors")
    kind = AutoModelForImageTextToText if family in SEEING else AutoModelForCausalLM
    adapted = peft.PeftModel.from_pretrained(kind.from_pretrained(tmp_path / "model"), tmp_path / "ours")
    state = {name: p.detach().numpy() for name, p in adapted.get_base_model().named_parameters() if "lora_" in name}
    state |= {name.replace("language_model.", ""): value for name, value in state.items()}
    missing = set()
    for name, tensor in stored.items():
        try:
            applied = by_projection(state, name)
        except KeyError:
            missing.add(re.search(r"mlp\.\w+|self_attn|linear_attn", name)[0])
            continue
        np.testing.assert_array_equal(applied, tensor.numpy(), err_msg=name)
    assert missing == left_out
    assert any("linear_attn.in_proj" in name for name in state)


def edit(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def without_one(folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    del tensors["base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight"]
    save_file(tensors, folder / "adapter_model.safetensors")


def truncate(folder: Path) -> None:
    data = (folder / "adapter_model.safetensors").read_bytes()
    (folder / "adapter_model.safetensors").write_bytes(data[:1000])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "adapter_config.json").unlink(), "is no PEFT adapter: it has no adapter_config.json"),
        (lambda f: (f / "adapter_config.json").write_text("{"), "adapter_config.json is not valid JSON"),
        (lambda f: edit(f, peft_type="LOHA"), "peft_type is 'LOHA', only 'LORA'"),
        (lambda f: edit(f, use_dora=True), "use_dora is True, only False is supported"),
        (lambda f: edit(f, lora_alpha=8), "lora_alpha is 8, lora.alpha is 10.0; set them alike"),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "has no adapter_model.safetensors"),
        (truncate, "is no intact safetensors file"),
        (without_one, r"lacks base_model.model.model.layers.1.mlp.experts.3.up_proj.lora_B.weight; it does not fit"),
    ],
)
def test_broken_folders(tmp_path: Path, spoil: Callable[[Path], Any], says: str) -> None:
    tiny = tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2)
    write_adapter(tmp_path / "adapter", tiny)
    model = load_hf_config(tmp_path / "model")
    check_peft_adapter(tmp_path / "adapter", model, CONFIG)
    spoil(tmp_path / "adapter")
    with pytest.raises(UserError, match=says):
        check_peft_adapter(tmp_path / "adapter", model, CONFIG)


def test_the_merged_model_is_no_adapter(tmp_path: Path) -> None:
    """A run writes both beside each other, each with its checksums."""
    tiny_qwen3_moe(tmp_path / "hf", num_hidden_layers=2)
    write_checksums(tmp_path / "hf", mark="config.json")
    with pytest.raises(UserError, match=r"is no PEFT adapter: it has no adapter_config\.json"):
        check_peft_adapter(tmp_path / "hf", load_hf_config(tmp_path / "hf"), CONFIG)


def test_an_adapter_that_may_not_be_read_is_not_called_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2)
    write_adapter(tmp_path / "adapter", tiny)
    model = load_hf_config(tmp_path / "model")
    fail_to_open(monkeypatch, "adapter_model", errno.ESTALE)
    with pytest.raises(SystemFault, match=rf"adapter_model\.safetensors cannot be read: {os.strerror(errno.ESTALE)}$"):
        check_peft_adapter(tmp_path / "adapter", model, CONFIG)


def test_targets(tmp_path: Path) -> None:
    tiny = tiny_qwen3_moe(tmp_path / "model", num_hidden_layers=2)
    write_adapter(tmp_path / "adapter", tiny)
    model = load_hf_config(tmp_path / "model")
    with pytest.raises(UserError, match=r"unused tensors: .*experts"):
        check_peft_adapter(tmp_path / "adapter", model, LoraConfig(**LORA, targets=("qkv", "o")))
    with pytest.raises(UserError, match=r"lora.targets=\['mlp'\] name no layer of this qwen3_moe model"):
        adapter_tensors(model, LoraConfig(targets=("mlp",)))
    with pytest.raises(ValueError, match="each once"):
        LoraConfig(targets=("qkv", "qkv"))


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def kinds_of(matrix: str) -> list[str]:
    return ["gate_proj", "up_proj"] if matrix == "linear_fc1" else ["down_proj"]


def expert_adapter(matrix: str, dtype: torch.dtype, experts: int, rows: int, cols: int, rank: int) -> LoraAdapter:
    """Of weights `[rows, cols]`, with random A and B and a scale of 6 / rank."""
    kinds = kinds_of(matrix)
    height = rows // len(kinds)
    local = []
    for e in range(experts):
        names = [kinds_name(e, kind) for kind in kinds]
        spans = [(i * height, (i + 1) * height) for i in range(len(kinds))]
        pieces = [Piece(n, ((0, height), (0, cols)), (span, (0, cols))) for n, span in zip(names, spans, strict=True)]
        name = f"decoder.layers.0.mlp.experts.{e}.{matrix}.weight"
        weight = torch.nn.Parameter(torch.zeros(rows, cols, dtype=dtype))
        site = Site(name, dict.fromkeys(names, (height, cols)), matrix == "linear_fc2")
        local.append(LocalSite(site, Owned(name, weight, tuple(pieces), (rows, cols))))
    sharding = Sharding(dist.group.WORLD, matrix == "linear_fc2", expert=True, sequence_parallel=False)
    adapter = LoraAdapter(local, LoraConfig(rank=rank, alpha=6), sharding, local[0].owned.parameter)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.normal_(generator=torch.Generator().manual_seed(1))
    return adapter


@pytest.mark.parametrize(("rank", "joined"), [(4, True), (3, False)])
def test_an_experts_layer_has_its_adapter_once(alone: None, rank: int, joined: bool) -> None:
    """Whether the layer's own product has it (rows of 16 bytes) or the hook adds it, and without it where it is off."""
    torch.manual_seed(0)
    layer: Any = Grouped().requires_grad_(requires_grad=False)
    layer.__class__ = _one_launch(Grouped)
    _line_up(layer)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.normal_()
    adapter = layer.lora = expert_adapter("linear_fc2", torch.float32, 3, 4, 8, rank)
    _add_output(layer, adapter, grouped=True)
    counts, x = [2, 0, 3], torch.randn(5, 8, requires_grad=True)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32)
    assert adapter.joins(x, ends) == joined
    parts = list(enumerate(x.split(counts)))
    frozen = torch.cat([F.linear(part, getattr(layer, f"weight{e}")) for e, part in parts])
    share = torch.cat([F.linear(F.linear(part, adapter.a[e]), adapter.b[e, 0]) for e, part in parts]) * 6 / rank
    y, _ = layer(x, ends)
    torch.testing.assert_close(y, frozen + share)
    wanted = torch.autograd.grad((frozen + share).square().sum(), [x, adapter.a, adapter.b])
    for mine, right in zip(torch.autograd.grad(y.square().sum(), [x, adapter.a, adapter.b]), wanted, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4, rtol=1e-4)
    adapter.off = True
    torch.testing.assert_close(layer(x, ends)[0], frozen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("matrix", ["linear_fc1", "linear_fc2"])
def test_experts_in_one_grouped_product(alone: None, matrix: str, dtype: torch.dtype) -> None:
    """float32 takes the grouped product that a GPU takes, float64 the loop; both against a loop written here."""
    experts, rows, cols, rank = 5, 24, 16, 4
    kinds = kinds_of(matrix)
    height = rows // len(kinds)
    adapter = expert_adapter(matrix, dtype, experts, rows, cols, rank)
    splits = [3, 0, 7, 1, 0]
    x = torch.randn(sum(splits), cols, dtype=dtype, requires_grad=True)
    output = torch.randn(sum(splits), rows, dtype=dtype, requires_grad=True)
    y = adapter.add_to_grouped(output, x, splits)
    upstream = torch.randn(y.shape, dtype=dtype)
    got = torch.autograd.grad(y, [x, output, adapter.a, adapter.b], upstream)

    whole = []
    for e, (rows_of, y_of) in enumerate(zip(x.split(splits), output.split(splits), strict=True)):
        parts = []
        for kind in range(len(kinds)):
            a = adapter.a[e, kind * rank : (kind + 1) * rank]
            b = adapter.b[e].reshape(rows, rank)[kind * height : (kind + 1) * height]
            delta = adapter.delta(kinds_name(e, kinds[kind]), ((kind * height, (kind + 1) * height), (0, cols)))
            torch.testing.assert_close(delta, 1.5 * b @ a)
            parts.append(1.5 * F.linear(F.linear(rows_of, a), b))
        whole.append(y_of + torch.cat(parts, dim=1))
    expected = torch.autograd.grad(torch.cat(whole), [x, output, adapter.a, adapter.b], upstream, retain_graph=True)
    torch.testing.assert_close(y, torch.cat(whole))
    for mine, right in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)
    nothing = adapter.add_to_grouped(output[:0], x[:0], [0] * experts)
    assert nothing.shape == (0, rows)

    ends = torch.tensor(splits).cumsum(0, dtype=torch.int32)
    assert adapter.joins(x, ends) == (dtype is torch.float32)
    assert not adapter.joins(x, splits)
    if dtype is torch.float64:
        return
    stack = torch.randn(experts, rows, cols)
    z = adapter.product(x, ends, stack)
    frozen = torch.cat([F.linear(part, w) for part, w in zip(x.split(splits), stack, strict=True)])
    right = frozen + torch.cat(whole) - output
    torch.testing.assert_close(z, right)
    wanted = torch.autograd.grad(right, [x, adapter.a, adapter.b], upstream)
    for mine, one in zip(torch.autograd.grad(z, [x, adapter.a, adapter.b], upstream), wanted, strict=True):
        torch.testing.assert_close(mine, one, atol=1e-5, rtol=1e-5)
    z = adapter.product(x[:0], ends * 0, stack)
    assert z.shape == (0, rows)
    assert all((g == 0).all() for g in torch.autograd.grad(z.sum(), [adapter.a, adapter.b]))
    with torch.no_grad():
        adapter.b.zero_()
    assert torch.equal(adapter.product(x, ends, stack), GroupedLinear.apply(x, ends, stack, False, stack[0]))


def kinds_name(expert: int, kind: str) -> str:
    return f"experts.{expert}.{kind}.weight"
