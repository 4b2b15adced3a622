"""What a layer of experts holds at most, counted tensor by tensor as it runs, beside what the planner says."""

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dppo.actor.layers import release_dispatched
from megatron_dppo.compat import megatron_cpu
from megatron_dppo.models.build import build_model
from megatron_dppo.models.experts.module import recompute_cheap_parts, take_over_experts
from megatron_dppo.models.hf_config import HFConfig, resolve_hf_config
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.models.parallel import ParallelConfig, Recompute
from megatron_dppo.planner.activations import layer_memory
from megatron_dppo.planner.gpus import GPUS
from megatron_dppo.planner.workload import Layout
from tests.distributed import run_ranks
from tests.models.public_configs import CONFIGS

H200 = GPUS["h200-141g"]
TOKENS, WIDTH = 256, 16
"""Narrow experts, so that what only a CPU's SwiGLU holds (float32 copies) is little beside the rows."""
ALL, SOME = LoraConfig(rank=8), LoraConfig(rank=8, targets=("qkv", "o"))


def small() -> HFConfig:
    """DeepSeek-V3 with a layer of each kind: sigmoid scores, a shared expert."""
    sizes = {"hidden_size": 2048, "intermediate_size": 64, "moe_intermediate_size": WIDTH, "vocab_size": 128}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 4, "n_group": 2, "topk_group": 2}
    layers = {"num_hidden_layers": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
    return resolve_hf_config(CONFIGS["DeepSeek-V3"] | sizes | heads | experts | layers)


class Grouped(torch.nn.Module):
    """What TransformerEngine's GroupedLinear has of weights, which a CPU cannot build."""

    fuse_wgrad_accumulation = False

    def __init__(self, experts: int, columns: int, rows: int, **_: Any) -> None:
        super().__init__()
        self.num_gemms = experts
        for expert in range(experts):
            self.register_parameter(
                f"weight{expert}", torch.nn.Parameter(torch.randn(rows, columns, dtype=torch.bfloat16) / 64)
            )


class Live(TorchDispatchMode):
    """Bytes of all tensors that were made since it began and are there still: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.most = 0

    def now(self) -> int:
        self.storages = {key: one for key, one in self.storages.items() if not one.expired()}
        there = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in self.storages.values())
        return sum(one.nbytes() for one in there if one is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {one.untyped_storage()._cdata for one in torch.utils._pytree.tree_leaves((args, kwargs)) if
                 isinstance(one, torch.Tensor)}  # fmt: skip
        made = func(*args, **(kwargs or {}))
        for one in torch.utils._pytree.tree_leaves(made):
            if isinstance(one, torch.Tensor) and one.untyped_storage()._cdata not in known:
                self.storages[one.untyped_storage()._cdata] = StorageWeakRef(one.untyped_storage())
        self.most = max(self.most, self.now())
        return made


def counted(rank: int, cases: list[tuple[LoraConfig | None, Recompute]]) -> list[tuple[int, int]]:
    """Of each case the most bytes in the layer's forward and in its backward, beside its input."""
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    from megatron_dppo.models.groups import initialize_groups
    from megatron_dppo.models.lora.attach import attach_adapters

    megatron_cpu.install()
    model, parallel, found = small(), ParallelConfig(), []
    groups = initialize_groups(parallel, seed=0, gloo_copies=False)
    config = transformer_config(model, parallel)
    for lora, recompute in cases:
        chunks = build_model(model, config, groups)
        layer: Any = chunks[0].decoder.layers[1].mlp
        layer.shared_experts.bfloat16()
        layer.router.weight.data = torch.randn(8, 2048, generator=torch.Generator().manual_seed(0)).bfloat16() / 64
        layer.experts = TEGroupedMLP(8, config, GroupedMLPSubmodules(Grouped, Grouped), groups)
        take_over_experts(chunks)
        if recompute == "activation":
            recompute_cheap_parts([layer])
        if lora:
            attach_adapters(chunks, model, groups, lora)
        release_dispatched(chunks)
        for parameter in layer.parameters():  # a trained one's is added to its buffer
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None))
        x = torch.randn(TOKENS, 1, 2048, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with Live() as live:
            output, _ = layer(x)
            live.most, forward = 0, live.most
            output.backward(torch.ones_like(output))
        found.append((forward, live.most))
    return found


def planned(lora: LoraConfig | None, recompute: Recompute) -> tuple[int, int]:
    """The same two of the planner's operators behind the norm, whose output is the input here."""
    plan = Layout(small(), H200, 1, ParallelConfig(), recompute, microbatch_tokens=TOKENS, lora=lora)
    operators = layer_memory(plan, 1).operators
    running, forward, backward = 0, 0, 0
    # A CPU makes tensors of weights' gradients, and of an adapter's share before it adds it.
    weights = {"experts, fc1": 2 * 2 * 8 * WIDTH * 2048} if lora is None else {}
    apart = {"experts, fc1": (2 * WIDTH, 2048), "experts, fc2": (2048, WIDTH)} if lora == ALL else {}
    for one in operators[[o.name for o in operators].index("norm") + 1 :]:
        running += one.kept
        out, into = (2 * 4 * TOKENS * width for width in apart.get(one.name, (0, 0)))
        into += weights.get(one.name, 0)
        forward, backward = max(forward, running + one.forward + out), max(backward, running + one.backward + into)
    return forward, backward + 2 * TOKENS * 2048  # the caller holds the layer's output


def test_the_planner_counts_what_is_there() -> None:
    """Trained whole, by adapters and frozen. One rank: gloo's threads hold what they exchanged for some time."""
    cases: list[tuple[LoraConfig | None, Recompute]] = [(None, "none"), (ALL, "none"), (SOME, "none")]
    cases += [(None, "activation"), (ALL, "activation")]
    (found,) = run_ranks(counted, 1, cases)
    for case, (forward, backward) in zip(cases, found, strict=True):
        assert (forward, backward) == pytest.approx(planned(*case), rel=0.01), case
