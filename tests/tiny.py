"""Tiny random Hugging Face checkpoints, written by transformers itself. Every parameter is random (norms and biases
too), so that a test sees a weight that went missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 300

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}

_SIGMOID: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
}
_LATENT: dict[str, Any] = _SIGMOID | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "rms_norm_eps": 1e-3,  # which the norms of the latent vectors do not have
}
_DEEPSEEK: dict[str, Any] = _LATENT | {
    "n_group": 2,
    "topk_group": 1,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

_HYBRID: dict[str, Any] = {
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
_SECTIONS: dict[str, Any] = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    }
}
_SIGHT: dict[str, Any] = {
    "vision_config": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "num_position_embeddings": 16,
        "patch_size": 4,
    },
    "image_token_id": VOCAB_SIZE - 4,
    "video_token_id": VOCAB_SIZE - 3,
    "vision_start_token_id": VOCAB_SIZE - 2,
    "vision_end_token_id": VOCAB_SIZE - 1,
}
SEEING = {"qwen3_5": _SIGHT, "qwen3_5_moe": _SIGHT}
"""What stands beside `text_config` of models that see images too."""

_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 32},
    "olmoe": {
        "hidden_size": 128,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "norm_topk_prob": False,
        "rms_norm_eps": 1e-5,
    },
    "glm4_moe": _SIGMOID
    | {
        "head_dim": 32,
        "attention_bias": True,
        "use_qk_norm": True,
        "rms_norm_eps": 1e-5,
    },
    "minimax_m2": {
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "qwen3_next": _HYBRID,
    "qwen3_5_moe": _HYBRID | _SECTIONS,
    "qwen3_5": {n: value for n, value in _HYBRID.items() if "expert" not in n and "moe" not in n} | _SECTIONS,
    "deepseek_v3": _DEEPSEEK,
    "kimi_k2": _DEEPSEEK | {"n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0},
    "glm4_moe_lite": _LATENT,
    "gpt_oss": {
        "head_dim": 32,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
        "rms_norm_eps": 1e-5,
    },
    "qwen3": {"head_dim": 32},
    "qwen2": {},
    "llama": {"rms_norm_eps": 1e-5},
}
_ALIASES = {"kimi_k2": "deepseek_v3"}
"""By which transformers knows a model type."""


def tiny_model(family: str, path: Path | str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Write a random fp32 model of `family` (a model type of transformers) with a tokenizer to `path`; return it, or
    the text part of a model that sees images too.

    `overrides` are fields of the family's Hugging Face configuration, and `dtype` and `max_shard_size` of the file.
    """
    dtype = overrides.pop("dtype", torch.float32)
    max_shard_size = overrides.pop("max_shard_size", "50GB")
    config = make_config(_ALIASES.get(family, family), **{**_COMMON, **_FAMILIES.get(family, {}), **overrides})
    config._attn_implementation = "eager" if family == "gpt_oss" else "sdpa"  # which has no sinks
    model = auto_class(config).from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("A_log"):
                parameter.copy_(-2.0 + 0.5 * noise)  # states that last, or nobody would see one that leaks
            elif name.endswith("_proj_bias"):
                parameter.copy_(3.0 * noise)  # of experts: beyond the limits of their activation here and there
            elif parameter.ndim == 1:
                centre = 0.0 if parameter.abs().max() == 0 else 1.0  # biases start at 0, norms at 1
                parameter.copy_(centre + 0.2 * noise)
            else:
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
        for bias in correction_biases(model):
            bias.copy_(0.1 * torch.randn(bias.shape, generator=generator))
    model.tie_weights()
    exact = correction_biases(model)
    model = model.to(dtype).eval()
    for bias, value in zip(correction_biases(model), exact, strict=True):  # float32 in every checkpoint
        bias.data = value
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if family != config.model_type:
        file = Path(path) / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": family}))
    tiny_tokenizer().save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto").eval() if family in SEEING else model


def make_config(family: str, **fields: Any) -> PreTrainedConfig:
    """Of a model type of transformers; `fields` are its decoder's."""
    if family not in SEEING:
        return AutoConfig.for_model(family, **fields)
    if "num_experts" in fields:
        fields.pop("intermediate_size", None)  # it has no dense layer
    tied = fields.get("tie_word_embeddings", False)
    return AutoConfig.for_model(family, text_config=fields, tie_word_embeddings=tied, **SEEING[family])


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that makes and saves such a model whole."""
    return AutoModelForImageTextToText if config.get_text_config() is not config else AutoModelForCausalLM


def correction_biases(model: PreTrainedModel) -> list[torch.Tensor]:
    return [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]


def tiny_qwen3_moe(path: Path | str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """`tiny_model("qwen3_moe", ...)`: 4 MoE layers, 8 experts, top-2, GQA 4:2, QK-norm, untied head."""
    return tiny_model("qwen3_moe", path, seed, **overrides)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, an end-of-sequence and a padding token, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<pad>": 0, "<eos>": 1} | {symbol: 2 + i for i, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")
    fast.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    return fast
