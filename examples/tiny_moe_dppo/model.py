"""The demo's model: a Qwen3-MoE (or one of another family) of about a million parameters with every feature of the
large ones, and a byte-level tokenizer that needs no files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

PAD, SYSTEM, USER, ASSISTANT, END = "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"

# One token per turn keeps prompts short. Only an assistant's turn is closed: the next turn's opening closes the others.
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{ raise_exception('unknown role ' + message['role']) }}
{%- endif -%}
{{ '<|' + message['role'] + '|>' + message['content'] }}
{%- if message['role'] == 'assistant' -%}{{ '<|end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte (any text round-trips), five special tokens, and a chat template. 261 tokens.

    `<|end|>` ends a sequence; `<|pad|>` pads. `AutoTokenizer` loads what its `save_pretrained` writes.
    """
    special = [PAD, SYSTEM, USER, ASSISTANT, END]
    symbols = special + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT],
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "head_dim": 32}
_HYBRID = _EXPERTS | {
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
_LATENT: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "intermediate_size": 256,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _EXPERTS
    | {"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 256, "norm_topk_prob": True},
    "mixtral": _EXPERTS | {"num_local_experts": 8, "intermediate_size": 64},
    "glm4_moe": _EXPERTS
    | {
        "n_routed_experts": 8,
        "moe_intermediate_size": 64,
        "intermediate_size": 256,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "routed_scaling_factor": 1.5,
        "attention_bias": True,
        "use_qk_norm": True,
    },
    "minimax_m2": _EXPERTS
    | {
        "num_local_experts": 8,
        "intermediate_size": 64,
        "rotary_dim": 16,
        "partial_rotary_factor": 0.5,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
    },
    "deepseek_v3": _LATENT | {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    "glm4_moe_lite": _LATENT,
    "gpt_oss": _EXPERTS
    | {
        "num_local_experts": 8,
        "intermediate_size": 64,
        "sliding_window": 16,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 256,
        },
    },
    "qwen3_next": _HYBRID | {"intermediate_size": 256},
    "qwen3_5_moe": _HYBRID,
    "olmoe": _EXPERTS | {"num_experts": 8, "intermediate_size": 64, "norm_topk_prob": False, "rms_norm_eps": 1e-5},
}
"""What each model type's configuration says of its experts."""
_SIGHT = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 128}
"""What it says of the part that sees images, where there is one; the demo shows it none."""


_WIDTHS = ("hidden_size", "head_dim", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def tiny_config(tokenizer: PreTrainedTokenizerBase, family: str, width: int = 1) -> PreTrainedConfig:
    """Four layers (GLM's and DeepSeek's first is dense), eight experts of which two are chosen, grouped-query attention
    4:2 (that of DeepSeek and GLM-4.7-Flash is latent), untied head. `width` multiplies hidden size, heads and experts.

    The vocabulary is the tokenizer's own size, which no tensor-parallel size divides: like the large models' it has to
    be padded for training.
    """
    fields = {
        "vocab_size": len(tokenizer),
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
        **FAMILIES[family],
    }
    fields |= {name: width * fields[name] for name in _WIDTHS if name in fields}
    if "vision_config" not in type(AutoConfig.for_model(family)).sub_configs:
        return AutoConfig.for_model(family, **fields)
    return AutoConfig.for_model(family, text_config=fields, vision_config=_SIGHT, tie_word_embeddings=False)


def random_tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int, family: str, width: int = 1) -> PreTrainedModel:
    """Freshly initialised in float32 from `seed`; the caller's random state is left as it was. Correction biases are
    drawn too: transformers begins with zeros, with which nobody would see them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(tokenizer, family, width)
        sees = config.get_text_config() is not config
        kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.02)
        return model


def random_tiny_qwen3_moe(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """The demo's model before its warm-up."""
    return random_tiny_model(tokenizer, seed, "qwen3_moe")


def write_checkpoint(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Hugging Face format: config.json, generation_config.json, safetensors, tokenizer with its chat template."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
