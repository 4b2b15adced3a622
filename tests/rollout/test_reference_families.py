"""The reference engine on the families that transformers has, none of which it names: against transformers' forward of
whole sequences, before and after a weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatron_dppo.batch import RolloutBatch
from megatron_dppo.errors import UserError
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.rollout.engine import SamplingConfig, update_weights
from megatron_dppo.rollout.reference.core import ReferenceEngine
from tests.checkpoint.test_carried import as_published
from tests.rollout.conftest import CONFIG, requests
from tests.rollout.reference import other_weights
from tests.tiny import VOCAB_SIZE, auto_class, make_config, tiny_model

REFERENCE = CONFIG.model_copy(update={"engine": "reference", "max_num_batched_tokens": 64})  # prompts come in chunks
SAMPLING = SamplingConfig(max_tokens=12, top_k_logprobs=5)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
    "bos_token_id": None,
    "pad_token_id": 0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
SIGMOID = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
SOFTMAX = {"num_experts": 8, "num_experts_per_tok": 2}
DELTA = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
HYBRID = SOFTMAX | DELTA | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24}
FAMILIES: dict[str, tuple[dict[str, Any], tuple[int, ...], int]] = {
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2}, (0, 1, 2), 2),
    "olmoe": (SOFTMAX, (0, 1, 2), 2),
    "qwen3_moe": (SOFTMAX | {"moe_intermediate_size": 24, "mlp_only_layers": [1]}, (0, 2), 2),
    "glm4_moe": (SIGMOID | {"use_qk_norm": True, "num_experts_per_tok": 2}, (1, 2), 2),
    "deepseek_v3": (SIGMOID | LATENT, (1, 2), 2),
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}, (0, 1, 2), 2),
    "minimax_m2": (
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rotary_dim": 8,
            "partial_rotary_factor": 0.5,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
        (0, 1, 2),
        2,
    ),
    "qwen3_next": (HYBRID, (0, 1, 2, 3), 2),
    "qwen3_5_moe": (HYBRID, (0, 1, 2, 3), 2),
    "qwen3_5": (DELTA, (), 0),
    "llama": ({}, (), 0),
    "gemma3_text": ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]}, (), 0),
}
"""By model type: fields of its config.json, layers that route, experts per token."""


def write(folder: Path, model_type: str, fields: dict[str, Any]) -> None:
    """A random model, every parameter and buffer of it, in the layout of published files."""
    config = make_config(model_type, **(COMMON | fields))
    model = auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                tensor.copy_(noise / tensor.shape[-1] ** 0.5)
            else:
                tensor.add_(0.2 * noise.to(tensor.dtype))
            assert tensor.isfinite().all(), name
    model.tie_weights()
    model.save_pretrained(folder)


@torch.no_grad()
def compare(batch: RolloutBatch, model: PreTrainedModel, layers: tuple[int, ...]) -> tuple[float, float]:
    """Largest gap of a log-probability, and the share of rows whose experts are not those of the whole sequence's."""
    chosen: dict[int, torch.Tensor] = {}
    for layer in layers:
        experts = model.get_submodule(f"model.layers.{layer}.mlp.experts")
        experts.register_forward_pre_hook(lambda _, given, layer=layer: chosen.__setitem__(layer, given[1]))
    gap, wrong = 0.0, 0
    for b in range(len(batch)):
        rows = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        ids, prompt = batch.token_ids[rows].astype(np.int64), int(batch.prompt_lengths[b])
        logits = model(input_ids=torch.from_numpy(ids)[None]).logits[0, prompt - 1 : -1]
        logp = logits.double().log_softmax(-1).numpy()
        sampled = slice(rows.start + prompt, rows.stop)
        gap = max(gap, np.abs(logp[np.arange(len(logp)), ids[prompt:]] - batch.mu_logp[sampled]).max())
        best = np.take_along_axis(logp, batch.topk_ids[sampled].astype(np.int64), axis=1)
        gap = max(gap, np.abs(best - batch.topk_logp[sampled]).max())
        if layers:
            whole = torch.stack([chosen[layer] for layer in layers], dim=1)[:-1].sort(dim=-1).values.numpy()
            assert batch.routes is not None
            got = np.sort(batch.routes.experts[rows][:-1].astype(np.int64), axis=-1)
            wrong += int((whole != got).any(axis=-1).sum())
    return gap, wrong / len(batch.token_ids)


def agree(gap: float, wrong: float, family: str) -> bool:
    """A gated delta rule carries rounding on from token to token, another way in steps than in whole."""
    print(f"{family}: {gap:.1e} nats, {wrong:.1%} of the rows went to other experts")
    return bool(
        gap < (5e-3 if FAMILIES[family][0].keys() >= DELTA.keys() else 5e-5) and wrong < 0.002
    )  # ties within rounding


@pytest.mark.parametrize("family", FAMILIES)
def test_records_are_those_of_whole_sequences(family: str, tmp_path: Path) -> None:
    fields, layers, topk = FAMILIES[family]
    write(tmp_path / "one", family, fields)
    engine = ReferenceEngine(tmp_path / "one", REFERENCE)
    try:
        routes = engine.core.routes
        assert (routes is None) == (not layers)
        if routes is not None:
            assert (routes.moe_layers, routes.topk) == (layers, topk)
        batch = engine.generate(requests(24, "loaded"), SAMPLING, training=True)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "one", dtype=torch.float32).eval()
        assert agree(*compare(batch, model, layers), family)

        sent = (engine.facts.model and engine.facts.model.tensors) or other_weights(tmp_path / "one", seed=3)
        weights = {name: t for name, t in other_weights(tmp_path / "one", seed=3).items() if name in sent}
        update_weights(engine, 1, weights.items(), bucket_mib=1)
        batch = engine.generate(requests(24, "synced"), SAMPLING, training=True)
        model = type(model).from_pretrained(None, config=model.config, state_dict=weights, dtype=torch.float32).eval()
        assert agree(*compare(batch, model, layers), family)
    finally:
        engine.close()


def test_a_sync_brings_the_decoder_alone(tmp_path: Path) -> None:
    """Of a checkpoint as Qwen3.5 is published, with stacks of experts and with more beside them."""
    folders = [tmp_path / "one", tmp_path / "other"]
    for seed, folder in enumerate(folders):
        tiny_model("qwen3_5_moe", folder, seed)
    model, (stored, sent) = load_hf_config(folders[0]), (load_file(one / "model.safetensors") for one in folders)
    save_file(as_published(stored, model) | {"mtp.fc.weight": torch.ones(3, 4)}, folders[0] / "model.safetensors")
    engine = ReferenceEngine(folders[0], REFERENCE)
    try:
        update_weights(engine, 1, ((name, sent[name]) for name in model.tensors), bucket_mib=1)
        batch = engine.generate(requests(24, "synced"), SAMPLING, training=True)
    finally:
        engine.close()
    right = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.float32).eval()
    assert agree(*compare(batch, right, (0, 1, 2, 3)), "qwen3_5_moe")


def test_experts_that_are_not_told_apart_are_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, "jetmoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16})
    with pytest.raises(UserError, match=r"cannot record the experts of JetMoe\w+: .* set rollout.router_replay=false"):
        ReferenceEngine(tmp_path, REFERENCE)
    engine = ReferenceEngine(tmp_path, REFERENCE.model_copy(update={"router_replay": False}))
    try:
        assert engine.generate(requests(4, "without"), SAMPLING, training=True).routes is None
    finally:
        engine.close()
