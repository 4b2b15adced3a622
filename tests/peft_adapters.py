"""Random adapters as PEFT stores them, and transformers + PEFT with them, for tests."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

if TYPE_CHECKING:
    from peft import PeftModel

WEIGHTS, _TEXT = "adapter_model.safetensors", "language_model."
RANK, ALPHA = 4, 10.0
LORA = {"rank": RANK, "alpha": ALPHA}
_ATTENTION = r"self_attn\.([qkvo]|(q|kv)_[ab])_proj(_with_mqa)?|linear_attn\.(in_proj_\w+|out_proj)"
_LINEAR = re.compile(rf"model\.layers\.\d+\.({_ATTENTION}|mlp\.(shared_experts?\.)?(gate|up|down)_proj)")


def lora_of(model_type: str) -> dict[str, Any]:
    """Fields of `LoraConfig` for what `write_adapter` writes. Experts with biases get no adapters."""
    return LORA | {"targets": ["qkv", "o"]} if model_type == "gpt_oss" else LORA


def write_adapter(folder: Path, model: PreTrainedModel, *, dtype: torch.dtype = torch.float32, seed: int = 5) -> None:
    """A random adapter (B too) on every projection of attention, MLPs and experts without biases, by the layout vLLM
    loads."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    in_the_whole = f"model.{_TEXT}" if model.config.model_type.endswith("_text") else "model."

    def add(name: str, rows: int, cols: int) -> None:
        name = name.replace("model.", in_the_whole, 1)
        for matrix, shape in (("A", (RANK, cols)), ("B", (rows, RANK))):
            noise = torch.randn(shape, generator=generator) * 0.3 / shape[1] ** 0.5
            tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = noise.to(dtype)

    for name, module in model.named_modules():
        if _LINEAR.fullmatch(name):
            add(name, *module.weight.shape)
        elif name.endswith(".mlp.experts") and not hasattr(module, "gate_up_proj_bias"):
            experts, both, cols = module.gate_up_proj.shape
            names = ["gate_proj", "up_proj", "down_proj"]
            if model.config.model_type in ("mixtral", "minimax_m2"):
                name, names = name.replace(".mlp.", ".block_sparse_moe."), ["w1", "w3", "w2"]
            for expert in range(experts):
                for kind in names[:2]:
                    add(f"{name}.{expert}.{kind}", both // 2, cols)
                add(f"{name}.{expert}.{names[2]}", *module.down_proj.shape[1:])
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS)
    modules = sorted({tensor.split(".lora_")[0].rpartition(".")[2] for tensor in tensors})
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": modules, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(described | {"task_type": "CAUSAL_LM"}))


def with_peft(
    model: PreTrainedModel, folder: Path, *, dtype: torch.dtype = torch.float64, trainable: bool = False
) -> PeftModel:
    """A copy of `model` in `dtype` with PEFT's adapter of `folder`.

    PEFT makes one adapter of gate's and up's: B is block-diagonal and trained, it would not stay so. The gradient of
    what must stay zero is dropped, so that PEFT trains the two adapters that the folder holds.
    """
    from peft import PeftModel  # ranks import this module too, and need not wait for PEFT

    base = copy.deepcopy(model).to(dtype)
    if getattr(base.config, "num_experts", 0) or getattr(base.config, "num_local_experts", 0):
        base.set_experts_implementation("eager")  # the grouped product has no float64
    stored = load_file(folder / WEIGHTS)
    if base.config.model_type.endswith("_text"):  # the adapter is one of the model around it
        folder = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-{uuid4()}")))
        stored = {name.replace(f".{_TEXT}", ".", 1): tensor for name, tensor in stored.items()}
        save_file(stored, folder / WEIGHTS)
        base.config.model_type = "qwen3_next"  # of the same experts, which PEFT knows to be stacked
    adapted = PeftModel.from_pretrained(base, folder, is_trainable=trainable, autocast_adapter_dtype=False)
    _add_left_out(adapted, stored, trainable)
    if trainable:
        for name, parameter in adapted.named_parameters():
            if name.endswith(".experts.base_layer.lora_B.default.weight"):
                parameter.register_hook(_block_diagonal)
    return adapted


def _add_left_out(adapted: PeftModel, stored: dict[str, torch.Tensor], trainable: bool) -> None:
    """Where a model has experts too, PEFT with transformers 5 takes the names of a dense MLP's projections for those of
    experts and leaves out the adapters of dense layers and shared experts."""
    from peft.tuners.lora.layer import Linear

    base = adapted.get_base_model()
    for name, module in list(base.named_modules()):
        if _LINEAR.fullmatch(name) and not hasattr(module, "lora_A"):
            layer = Linear(module, "default", config=adapted.peft_config["default"], r=RANK, lora_alpha=ALPHA)
            for matrix, factor in (("A", layer.lora_A), ("B", layer.lora_B)):
                weight = stored[f"base_model.model.{name}.lora_{matrix}.weight"].to(module.weight.dtype)
                factor["default"].weight = torch.nn.Parameter(weight, requires_grad=trainable)
            base.set_submodule(name, layer)


def _block_diagonal(gradient: torch.Tensor) -> torch.Tensor:
    kept = gradient.clone().view(2, gradient.shape[0] // 2, 2, RANK, -1)
    kept[0, :, 1] = kept[1, :, 0] = 0
    return kept.view(gradient.shape)


def by_projection(state: dict[str, np.ndarray], name: str) -> np.ndarray:
    """The entry behind a folder's tensor name in a PEFT model's state, which has all experts of a layer in one."""
    name = name.removeprefix("base_model.model.").replace(_TEXT, "", 1)
    name = name.replace(".block_sparse_moe.", ".mlp.")
    for stored, kind in (("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")):
        name = name.replace(f".{stored}.lora_", f".{kind}.lora_")
    match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.lora_([AB])\.weight", name)
    if not match:
        return state[name.removesuffix(".weight") + ".default.weight"]
    layer, expert, kind, matrix = match[1], int(match[2]), match[3], match[4]
    stacked = state[f"{layer}{'' if kind == 'down' else '.base_layer'}.lora_{matrix}.default.weight"]
    kinds, half = (1, 0) if kind == "down" else (2, int(kind == "up"))
    if matrix == "A":
        return stacked.reshape(-1, kinds, RANK, stacked.shape[1])[expert, half]
    return stacked.reshape(kinds, stacked.shape[0] // kinds, kinds, RANK, -1)[half, :, half, :, expert]
