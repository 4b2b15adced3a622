"""What vLLM's layerwise reloading does not see to, in the layers of one worker's model: that each got all of its
weights, that what CUDA graphs recorded stays, and that what must not be quantised is not; and norms' epsilon."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload.layerwise import LOADING_LAYERS, _layerwise_process, get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

LATENT_NORM_EPS = "megatron_dppo_latent_norm_eps"
"""In vLLM's `additional_config`, which tells apart the graphs that it keeps compiled."""
_PLAIN = (torch.float32, torch.bfloat16, torch.float16)


def incomplete_layers(model: torch.nn.Module) -> list[str]:
    """Layers that got nothing in the sync under way, or not all, each with what came: to be asked before vLLM finishes
    it, which keeps their old weights (with a warning in its log) or takes what lies in memory.

    Layers without weights of a checkpoint are left out (attention, which has scales; rotary tables, which are buffers),
    and so is padding. One matrix for embedding and head comes under one of the names.
    """
    layers, came = dict(model.named_modules()), set()
    missing: dict[str, tuple[int, int, set[int]]] = {}
    for name, layer in layers.items():
        info = get_layerwise_info(layer)
        if isinstance(layer, Attention | MLAAttention):
            continue
        held = info.kernel_tensors[0] if info.can_load() and info.kernel_tensors else layer._parameters
        tensors = [tensor for key, tensor in held.items() if tensor is not None and key not in SKIP_TENSORS]
        wanted = _own_numbers(layer, int(info.load_numel_total or 0)) if info.can_load() and tensors else 0
        places = {tensor.data_ptr() for tensor in tensors} - {0}  # 0: packed elsewhere, on a CPU
        if wanted and info.load_numel < wanted:
            missing[name] = (info.load_numel, wanted, places)
        else:
            came |= places
    return [
        f"{name} ({type(layers[name]).__name__}): {got} of {wanted} numbers came"
        for name, (got, wanted, places) in missing.items()
        if got or not places or not places <= came
    ]


def process_if_whole(layer: RoutedExperts) -> None:
    """Let vLLM process a layer of which every number came. It waits for those of padding too, which never come: the
    weights as they came would be held until the end of the sync, of every layer."""
    info = get_layerwise_info(layer)
    if info.can_load() and info.load_numel >= _own_numbers(layer, int(info.load_numel_total or 0)):
        _layerwise_process(layer, info)
        LOADING_LAYERS.discard(layer)


def _own_numbers(layer: torch.nn.Module, padded: int) -> int:
    """How many of a layer's `padded` numbers a checkpoint has: vLLM pads vocabularies, and experts for some kernels."""
    if isinstance(layer, VocabParallelEmbedding):
        rows = layer.num_embeddings_per_partition
        return padded // rows * (layer.shard_indices.num_org_elements + layer.shard_indices.num_added_elements)
    if isinstance(layer, RoutedExperts):
        moe = layer.moe_config
        hidden, width = int(moe.hidden_dim_unpadded or 0), int(moe.intermediate_size_per_partition_unpadded or 0)
        gates = 2 if moe.is_act_and_mul else 1
        numbers = layer.local_num_experts * (gates + 1) * width * hidden
        if moe.has_bias:
            numbers += layer.local_num_experts * (gates * width + hidden)
        return min(padded, numbers)
    return padded


def set_latent_norms(model: torch.nn.Module, eps: float) -> None:
    """Give the norms of latent vectors this epsilon, before the model is compiled: vLLM has the config's `rms_norm_eps`
    for them too, transformers and the trainer do not."""
    names = ("q_a_layernorm", "kv_a_layernorm")
    norms: list[Any] = [norm for path, norm in model.named_modules() if path.rpartition(".")[2] in names]
    if not norms or not all(hasattr(norm, "variance_epsilon") for norm in norms):
        raise RuntimeError(f"{type(model).__name__} has no {' and '.join(names)} whose epsilon could be set")
    for norm in norms:
        norm.variance_epsilon = eps


class KeptKernels:
    """vLLM makes a new kernel object for quantised experts after every load. CUDA graphs recorded the first one and the
    tensors that it made for itself, so that one stays, with what the new one computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        methods = [m.quant_method for m in model.modules() if isinstance(m, RoutedExperts)]
        self._kept: list[tuple[Any, Any, Any]] = [
            (method, method.moe_quant_config, method.moe_kernel)
            for method in methods
            if getattr(method, "moe_quant_config", None) is not None and method.moe_quant_config.is_quantized
        ]

    def put_back(self) -> None:
        """After a load."""
        for method, config, kernel in self._kept:
            refresh(config, method.moe_quant_config)
            refresh(kernel, method.moe_kernel)
            method.moe_quant_config, method.moe_kernel = config, kernel


def refresh(old: Any, new: Any) -> None:
    """The tensors that hang on `new` into those at the same place of `old`, through objects of vLLM's classes. Raises
    RuntimeError where their shapes or types differ."""
    seen: set[int] = set()

    def visit(old: Any, new: Any, where: str) -> None:
        if old is new or id(old) in seen or type(old) is not type(new):
            return
        seen.add(id(old))
        if isinstance(old, torch.Tensor):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise RuntimeError(f"{where} was {old.dtype} {list(old.shape)} and is {new.dtype} {list(new.shape)}")
            if old.data_ptr() != new.data_ptr():
                old.data.copy_(new)
        elif type(old).__module__.startswith("vllm."):
            for name in vars(old) if hasattr(old, "__dict__") else ():
                visit(getattr(old, name), getattr(new, name, None), f"{where}.{name}")

    visit(old, new, type(old).__name__)


def wrongly_quantised(model: torch.nn.Module) -> list[str]:
    """What is wrong with a model that is to compute in FP8 except for its routers, embedding and head, in words: a
    quantised router would send tokens elsewhere than the trainer's."""
    layers = dict(model.named_modules())
    quantised = list(_quantised(layers))
    wrong = [f"{name} is {dtype}" for name, dtype in quantised if isinstance(layers[name], VocabParallelEmbedding)]
    for name, layer in layers.items():
        if not isinstance(layer, RoutedExperts):
            continue
        block, routers = name.removesuffix(".routed_experts").rpartition(".")[0], []
        for child, module in layers[block].named_children():
            width = getattr(module, "output_size", getattr(module, "out_features", None))
            if width == layer.moe_config.num_logical_experts:
                routers.append(child)
                wrong += [f"{block}.{child}, a router, is {dtype}" for _, dtype in _quantised({"": module})]
        if not routers:
            wrong.append(f"{block} has no router that could be looked at")
    if not quantised:
        wrong.append("no layer is quantised")
    return wrong


def _quantised(layers: dict[str, torch.nn.Module]) -> Iterator[tuple[str, torch.dtype]]:
    """Layers whose weight is of a type that one does not train in."""
    for name, layer in layers.items():
        for weight in ("weight", "w13_weight", "w2_weight"):
            tensor = layer._parameters.get(weight)
            if tensor is not None and tensor.dtype not in _PLAIN:
                yield name, tensor.dtype
