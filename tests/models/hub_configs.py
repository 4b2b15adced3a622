"""config.json files of the families' models as published: what stands in
`huggingface.co/NAME/blob/main/config.json`, NAME being the key. Each is written as the fields in which it differs from
a sister's.

Written from memory and then compared, field by field, with copies of the files in public repositories as far as some
were found. Equal: Qwen2.5-0.5B, 1.5B and 72B-Instruct, Qwen2.5-14B-Instruct and Qwen2.5-7B-Instruct-1M (what is quoted
of them), Qwen3-4B, 8B, 14B, 32B and 30B-A3B, Qwen3-Coder-480B-A35B-Instruct, DeepSeek-R1-Distill-Qwen-1.5B and
DeepSeek-R1-0528-Qwen3-8B, Llama-3.1-8B, 3.2-3B (but for the end tokens of their Instruct versions) and
3.3-70B-Instruct, Llama-2-13b, SmolLM2-135M and 1.7B-Instruct. Qwen2.5-32B and the Coder were corrected by them.
Sources: sglang/Model_Config.md of citsjtu2020/LLM-Prof, src/aiconfigurator/model_configs of ai-dynamo/aiconfigurator,
and configurations that logs of training and serving print. Qwen3.5-397B-A17B is as in the second, but for its rotary
settings, which are 35B-A3B's as an inventory of its files has them; 27B's sizes give the hub's count of its numbers.
DeepSeek-V3 is as in the test of Megatron-Bridge's bridge
for it, V3.1 as in an instruction for torchtitan, R1 and GLM-4.7-Flash as reports on their files print them
(`test_published_tensors.py`), Moonlight-16B-A3B-Instruct as a reader's test quotes it (the base model alone ends with
another token); of Kimi-K2-Instruct the sizes, and of 0905 the rotation, stand in public files. Of the others
no copy was found."""

from __future__ import annotations

from typing import Any

from tests.models.public_configs import CONFIGS

Config = dict[str, Any]

_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")


def _sized(base: Config, *sizes: int, **fields: Any) -> Config:
    """`base` with hidden size, MLP size, layers, heads and key-value heads, and other fields; None removes one."""
    merged = base | dict(zip(_SIZES, sizes, strict=True)) | fields
    return {name: value for name, value in merged.items() if value is not _ABSENT}


_ABSENT = object()

_QWEN2: Config = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_QWEN2_7B = (3584, 18944, 28, 28, 4)
_LARGE = {"sliding_window": 131072, "vocab_size": 152064}
_MATH = {"max_position_embeddings": 4096, "rope_theta": 10000, "sliding_window": 4096, "use_mrope": False}
_DISTILL = _MATH | {"max_position_embeddings": 131072, "eos_token_id": 151643}
_YARN_BY_HAND = {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
"""What the model cards of Qwen2.5 and Qwen3 tell to add for long texts."""
_DUAL_CHUNK = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}


def _without(config: Config, name: str) -> Config:
    return {key: value for key, value in config.items() if key != name}


_QWEN3: Config = {name: value for name, value in CONFIGS["Qwen3-8B"].items() if name not in _SIZES}
_QWEN3_MOE: Config = {name: value for name, value in CONFIGS["Qwen3-30B-A3B"].items() if name not in _SIZES}
_30B = (2048, 6144, 48, 32, 4)
_CODER: Config = {
    name: value for name, value in _QWEN3_MOE.items() if name not in ("attention_bias", "bos_token_id")
} | {
    "max_position_embeddings": 262144,
    "max_window_layers": 28,
    "qkv_bias": False,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "use_qk_norm": True,
}

_GLM: Config = CONFIGS["GLM-4.5-Air"] | {
    "first_k_dense_replace": 3,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 160,
    "routed_scaling_factor": 2.5,
    "use_qk_norm": True,
}
_355B = (5120, 12288, 92, 96, 8)

_LLAMA2: Config = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 4096,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.31.0.dev0",
    "use_cache": True,
    "vocab_size": 32000,
}
_7B = (4096, 11008, 32, 32, 32)


def _seeing(decoder: Config, **fields: Any) -> Config:
    """Qwen3.5-35B-A3B with other fields of its decoder, and of what is around it."""
    whole = CONFIGS["Qwen3.5-35B-A3B"]
    return whole | {"text_config": whole["text_config"] | decoder} | fields


_SECTIONS = CONFIGS["Qwen3.5-35B-A3B"]["text_config"]["rope_parameters"]
_LLAMA3: Config = _LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "vocab_size": 128256,
}
_LLAMA31: Config = _LLAMA3 | {
    "eos_token_id": [128001, 128008, 128009],
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "transformers_version": "4.42.3",
}
_8B = (4096, 14336, 32, 32, 8)
_70B = (8192, 28672, 80, 64, 8)
_LLAMA32: Config = _LLAMA31 | {"rope_scaling": _LLAMA31["rope_scaling"] | {"factor": 32.0}, "tie_word_embeddings": True}
_SMOL: Config = _LLAMA3 | {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.041666666666666664,
    "is_llama_config": True,
    "mlp_bias": False,
    "pad_token_id": 2,
    "rope_interleaved": False,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "transformers.js_config": {"kv_cache_dtype": {"fp16": "float16", "q4f16": "float16"}},
    "vocab_size": 49152,
}

LOADED: dict[str, Config] = {
    "Qwen/Qwen1.5-0.5B-Chat": _sized(_QWEN2, 1024, 2816, 24, 16, 16, tie_word_embeddings=True),
    "Qwen/Qwen1.5-7B-Chat": _sized(_QWEN2, *_7B, max_window_layers=28),
    "Qwen/Qwen2-0.5B-Instruct": _sized(_QWEN2, 896, 4864, 24, 14, 2, max_window_layers=24, tie_word_embeddings=True),
    "Qwen/Qwen2-1.5B-Instruct": _sized(_QWEN2, 1536, 8960, 28, 12, 2, max_window_layers=28, tie_word_embeddings=True),
    "Qwen/Qwen2-7B-Instruct": _sized(_QWEN2, *_QWEN2_7B, **_LARGE, max_window_layers=28),
    "Qwen/Qwen2-72B-Instruct": _sized(_QWEN2, 8192, 29568, 80, 64, 8, **_LARGE, max_window_layers=80),
    "Qwen/Qwen2.5-0.5B-Instruct": _sized(_QWEN2, 896, 4864, 24, 14, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-1.5B-Instruct": _sized(_QWEN2, 1536, 8960, 28, 12, 2, tie_word_embeddings=True),
    "Qwen/Qwen2.5-3B-Instruct": _sized(_QWEN2, 2048, 11008, 36, 16, 2, max_window_layers=70, tie_word_embeddings=True),
    "Qwen/Qwen2.5-7B-Instruct": _sized(_QWEN2, *_QWEN2_7B, **_LARGE, max_window_layers=28),
    "Qwen/Qwen2.5-7B-Instruct, with the card's yarn": _sized(
        _QWEN2, *_QWEN2_7B, **_LARGE, max_window_layers=28, rope_scaling=_YARN_BY_HAND
    ),
    "Qwen/Qwen2.5-14B-Instruct": _sized(_QWEN2, 5120, 13824, 48, 40, 8, **_LARGE, max_window_layers=70),
    "Qwen/Qwen2.5-32B": _sized(
        _QWEN2,
        5120,
        27648,
        64,
        40,
        8,
        **_LARGE,
        eos_token_id=151643,
        max_position_embeddings=131072,
        max_window_layers=64,
        rms_norm_eps=1e-05,
    ),
    "Qwen/Qwen2.5-72B-Instruct": _sized(_QWEN2, 8192, 29568, 80, 64, 8, **_LARGE, max_window_layers=70),
    "Qwen/Qwen2.5-Coder-7B-Instruct": _sized(_QWEN2, *_QWEN2_7B, **_LARGE, max_window_layers=28),
    "Qwen/Qwen2.5-Math-1.5B": _sized(
        _QWEN2, 1536, 8960, 28, 12, 2, **_MATH, tie_word_embeddings=True, eos_token_id=151643
    ),
    "Qwen/Qwen2.5-Math-7B": _sized(_QWEN2, *_QWEN2_7B, **_MATH, vocab_size=152064, max_window_layers=28),
    "Qwen/QwQ-32B": _sized(_QWEN2, 5120, 27648, 64, 40, 8, max_position_embeddings=40960, vocab_size=152064),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": CONFIGS["DeepSeek-R1-Distill-Qwen-1.5B"],
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": _sized(
        _QWEN2, *_QWEN2_7B, **_DISTILL, vocab_size=152064, max_window_layers=28
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": _sized(
        _QWEN2, 5120, 13824, 48, 40, 8, **_LARGE, max_position_embeddings=131072, max_window_layers=48
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": _sized(
        _QWEN2, 5120, 27648, 64, 40, 8, **_LARGE, max_position_embeddings=131072, max_window_layers=64
    ),
    "agentica-org/DeepScaleR-1.5B-Preview": CONFIGS["DeepSeek-R1-Distill-Qwen-1.5B"]
    | {
        "_name_or_path": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "pad_token_id": 151643,
        "sliding_window": None,
        "torch_dtype": "float32",
    },
    "Qwen/Qwen3-0.6B": _sized(_QWEN3, 1024, 3072, 28, 16, 8, max_window_layers=28, tie_word_embeddings=True),
    "Qwen/Qwen3-1.7B": _sized(_QWEN3, 2048, 6144, 28, 16, 8, max_window_layers=28, tie_word_embeddings=True),
    "Qwen/Qwen3-4B": _sized(_QWEN3, 2560, 9728, 36, 32, 8, tie_word_embeddings=True),
    "Qwen/Qwen3-8B": CONFIGS["Qwen3-8B"],
    "Qwen/Qwen3-8B, with the card's yarn": CONFIGS["Qwen3-8B"]
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}},
    "Qwen/Qwen3-8B-Base": CONFIGS["Qwen3-8B"] | {"eos_token_id": 151643, "max_position_embeddings": 32768},
    "Qwen/Qwen3-14B": _sized(_QWEN3, 5120, 17408, 40, 40, 8, max_window_layers=40),
    "Qwen/Qwen3-32B": _sized(_QWEN3, 5120, 25600, 64, 64, 8, max_window_layers=64),
    "Qwen/Qwen3-4B-Instruct-2507": _sized(
        _QWEN3, 2560, 9728, 36, 32, 8, max_position_embeddings=262144, rope_theta=5000000, tie_word_embeddings=True
    ),
    "Qwen/Qwen3-Embedding-0.6B": _sized(
        _QWEN3, 1024, 3072, 28, 16, 8, max_position_embeddings=32768, tie_word_embeddings=True, vocab_size=151669
    ),
    "Qwen/Qwen3-30B-A3B": CONFIGS["Qwen3-30B-A3B"],
    "Qwen/Qwen3-30B-A3B-Base": CONFIGS["Qwen3-30B-A3B"] | {"eos_token_id": 151643, "max_position_embeddings": 32768},
    "Qwen/Qwen3-30B-A3B-Instruct-2507": CONFIGS["Qwen3-30B-A3B"]
    | {"max_position_embeddings": 262144, "rope_theta": 10000000},
    "Qwen/Qwen3-235B-A22B": CONFIGS["Qwen3-235B-A22B"],
    "Qwen/Qwen3-235B-A22B-Instruct-2507": CONFIGS["Qwen3-235B-A22B"]
    | {"max_position_embeddings": 262144, "rope_theta": 5000000},
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": _sized(_CODER, *_30B),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": _sized(
        _CODER, 6144, 8192, 62, 96, 8, moe_intermediate_size=2560, num_experts=160, max_window_layers=62
    ),
    "mistralai/Mixtral-8x7B-v0.1": CONFIGS["Mixtral-8x7B"],
    "mistralai/Mixtral-8x22B-Instruct-v0.1": CONFIGS["Mixtral-8x7B"]
    | {
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "max_position_embeddings": 65536,
        "num_attention_heads": 48,
        "num_hidden_layers": 56,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "vocab_size": 32768,
    },
    "allenai/OLMoE-1B-7B-0924": CONFIGS["OLMoE-1B-7B"],
    "zai-org/GLM-4.5-Air": CONFIGS["GLM-4.5-Air"],
    "zai-org/GLM-4.5": _sized(_GLM, *_355B),
    "zai-org/GLM-4.6": _sized(_GLM, *_355B, max_position_embeddings=202752),
    "zai-org/GLM-4.7": _sized(_GLM, *_355B, max_position_embeddings=202752, dtype="bfloat16", torch_dtype=_ABSENT),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": CONFIGS["Qwen3-Next-80B-A3B"],
    "Qwen/Qwen3.5-27B": CONFIGS["Qwen3.5-27B"],
    "Qwen/Qwen3.5-35B-A3B": CONFIGS["Qwen3.5-35B-A3B"],
    "Qwen/Qwen3.5-397B-A17B": CONFIGS["Qwen3.5-397B-A17B"],
    "Qwen/Qwen3.6-35B-A3B": _seeing({"bos_token_id": 248044, "output_gate_type": "swish"}, language_model_only=False),
    "Qwen/Qwen3.5-35B-A3B, for long texts": _seeing(
        {
            "rope_parameters": _SECTIONS
            | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}
        }
    ),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": CONFIGS["Qwen3-Next-80B-A3B"]
    | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262144}},
    "MiniMaxAI/MiniMax-M2, without its 8-bit numbers": CONFIGS["MiniMax-M2"],
    "deepseek-ai/DeepSeek-R1, without its 8-bit numbers": CONFIGS["DeepSeek-V3"]
    | {"aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": True},
    "deepseek-ai/DeepSeek-V3.1, without its 8-bit numbers": CONFIGS["DeepSeek-V3"] | {"transformers_version": "4.44.2"},
    "moonshotai/Kimi-K2-Instruct, without its 8-bit numbers": CONFIGS["Kimi-K2"] | {"aux_loss_alpha": 0.001},
    "moonshotai/Kimi-K2-Instruct-0905": CONFIGS["Kimi-K2"]
    | {"max_position_embeddings": 262144, "rope_scaling": CONFIGS["Kimi-K2"]["rope_scaling"] | {"factor": 64.0}},
    "moonshotai/Moonlight-16B-A3B": CONFIGS["Moonlight-16B-A3B"],
    "moonshotai/Moonlight-16B-A3B-Instruct": CONFIGS["Moonlight-16B-A3B"] | {"eos_token_id": 163586},
    "zai-org/GLM-4.7-Flash": CONFIGS["GLM-4.7-Flash"],
    "openai/gpt-oss-20b in bfloat16": CONFIGS["gpt-oss-20b"],
    "openai/gpt-oss-120b in bfloat16": CONFIGS["gpt-oss-120b"],
    "huggyllama/llama-7b": _sized(
        _LLAMA2, *_7B, max_position_embeddings=2048, rms_norm_eps=1e-06, pad_token_id=0, pretraining_tp=_ABSENT
    ),
    "lmsys/vicuna-7b-v1.5-16k": _sized(
        _LLAMA2,
        *_7B,
        pad_token_id=0,
        rope_scaling={"factor": 4.0, "type": "linear"},
        _name_or_path="vicuna-7b-v1.5-16k",
    ),
    "meta-llama/Llama-2-7b-hf": _sized(_LLAMA2, *_7B),
    "meta-llama/Llama-2-13b-chat-hf": _sized(_LLAMA2, 5120, 13824, 40, 40, 40, pretraining_tp=2),
    "meta-llama/Llama-2-70b-hf": _sized(_LLAMA2, *_70B),
    "NousResearch/Yarn-Llama-2-7b-64k": _sized(
        _LLAMA2,
        *_7B,
        _name_or_path="NousResearch/Llama-2-7b-hf",
        auto_map={
            "AutoConfig": "configuration_llama.LlamaConfig",
            "AutoModelForCausalLM": "modeling_llama_together_yarn.LlamaForCausalLM",
        },
        rope_scaling={"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096, "type": "yarn"},
    ),
    "codellama/CodeLlama-7b-hf": _sized(
        _LLAMA2, *_7B, max_position_embeddings=16384, rope_theta=1000000, vocab_size=32016
    ),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": _sized(
        _LLAMA2, 2048, 5632, 22, 32, 4, attention_bias=False, max_position_embeddings=2048, rope_theta=10000.0
    ),
    "deepseek-ai/deepseek-llm-7b-chat": _sized(
        _LLAMA2,
        4096,
        11008,
        30,
        32,
        32,
        bos_token_id=100000,
        eos_token_id=100001,
        rms_norm_eps=1e-06,
        vocab_size=102400,
    ),
    "deepseek-ai/deepseek-coder-6.7b-instruct": _sized(
        _LLAMA2,
        *_7B,
        bos_token_id=32013,
        eos_token_id=32021,
        max_position_embeddings=16384,
        rms_norm_eps=1e-06,
        rope_scaling={"factor": 4.0, "type": "linear"},
        rope_theta=100000,
        vocab_size=32256,
    ),
    "01-ai/Yi-1.5-9B-Chat": _sized(
        _LLAMA2, 4096, 11008, 48, 32, 4, pad_token_id=0, rms_norm_eps=1e-06, rope_theta=5000000.0, vocab_size=64000
    ),
    "meta-llama/Meta-Llama-3-8B-Instruct": _sized(_LLAMA3, *_8B, eos_token_id=128009),
    "meta-llama/Llama-3.1-8B-Instruct": _sized(_LLAMA31, *_8B),
    "meta-llama/Llama-3.1-405B": _sized(_LLAMA31, 16384, 53248, 126, 128, 8, eos_token_id=128001),
    "meta-llama/Llama-3.2-1B-Instruct": _sized(_LLAMA32, 2048, 8192, 16, 32, 8, head_dim=64),
    "meta-llama/Llama-3.2-3B-Instruct": _sized(_LLAMA32, 3072, 8192, 28, 24, 8, head_dim=128),
    "meta-llama/Llama-3.3-70B-Instruct": _sized(_LLAMA31, *_70B),
    "OctoThinker/OctoThinker-3B-Hybrid-Base": CONFIGS["OctoThinker-3B"],
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": _sized(_LLAMA31, *_8B, eos_token_id=128001),
    "allenai/Llama-3.1-Tulu-3-8B": _sized(
        _LLAMA31, *_8B, _name_or_path="allenai/open_instruct_dev", pad_token_id=128256, vocab_size=128264
    ),
    "tiiuae/Falcon3-1B-Instruct": _sized(
        _LLAMA3, 2048, 8192, 18, 8, 4, eos_token_id=11, head_dim=256, rope_theta=1000042, vocab_size=131072
    ),
    "HuggingFaceTB/SmolLM2-135M-Instruct": _sized(_SMOL, 576, 1536, 30, 9, 3),
    "HuggingFaceTB/SmolLM2-360M-Instruct": _sized(_SMOL, 960, 2560, 32, 15, 5),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": _sized(_SMOL, 2048, 8192, 24, 32, 32, rope_theta=130000),
}

_GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True}
_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
_GRANITE = {"attention_bias": True, "attention_dropout": 0.1, "mlp_bias": True, "rope_theta": 10000}

REFUSED: dict[str, tuple[Config, str]] = {
    "Qwen/Qwen2.5-0.5B-Instruct-GPTQ-Int4": (
        LOADED["Qwen/Qwen2.5-0.5B-Instruct"] | {"quantization_config": _GPTQ},
        "quantization_config",
    ),
    "Qwen/Qwen3-30B-A3B-FP8": (CONFIGS["Qwen3-30B-A3B"] | {"quantization_config": _FP8}, "quantization_config"),
    "Qwen/Qwen2.5-Math-PRM-7B": (
        LOADED["Qwen/Qwen2.5-Math-7B"] | {"architectures": ["Qwen2ForProcessRewardModel"], "num_labels": 2},
        "architectures",
    ),
    "Skywork/Skywork-Reward-Llama-3.1-8B": (
        LOADED["meta-llama/Llama-3.1-8B-Instruct"] | {"architectures": ["LlamaForSequenceClassification"]},
        "architectures",
    ),
    "ibm-granite/granite-3b-code-base-2k": (
        _sized(_SMOL, 2560, 10240, 32, 32, 32, **_GRANITE),
        "attention_(bias|dropout)",
    ),
    "Qwen/Qwen2.5-7B-Instruct-1M": (
        _sized(
            _QWEN2,
            *_QWEN2_7B,
            vocab_size=152064,
            max_position_embeddings=1010000,
            rope_theta=10000000.0,
            dual_chunk_attention_config=_DUAL_CHUNK,
            max_window_layers=28,
        ),
        "dual_chunk_attention_config",
    ),
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": (
        CONFIGS["Qwen3-8B"]
        | {
            "max_position_embeddings": 131072,
            "rope_scaling": {
                "attn_factor": 0.8782488562869419,
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
                "rope_type": "yarn",
            },
        },
        "rope_parameters.attn_factor",
    ),
    "Mixtral with its first window": (
        CONFIGS["Mixtral-8x7B"] | {"sliding_window": 4096},
        "sliding_window",
    ),
    "Qwen3 in numbers of no kind": (CONFIGS["Qwen3-8B"] | {"torch_dtype": "auto"}, "torch_dtype"),
    "Qwen3 that rotates by kinds of layers": (
        CONFIGS["Qwen3-8B"] | {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
        "rope_parameters",
    ),
    "Mixtral stretched by lists": (
        CONFIGS["Mixtral-8x7B"] | {"rope_scaling": {"rope_type": "longrope"}},
        "rope_scaling",
    ),
    "Mixtral with noise": (CONFIGS["Mixtral-8x7B"] | {"router_jitter_noise": 0.1}, "router_jitter_noise"),
    "MiniMaxAI/MiniMax-M2": (CONFIGS["MiniMax-M2"] | {"quantization_config": _FP8}, "quantization_config"),
    "MiniMax whose bias vLLM would leave out": (
        _sized(CONFIGS["MiniMax-M2"], 3072, 1536, 62, 48, 8, use_routing_bias=_ABSENT),
        "use_routing_bias",
    ),
    "Qwen3-Next whose value heads have no key head": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"linear_num_value_heads": 24},
        "linear_num_value_heads",
    ),
    "Qwen3.5 with a decoder of another type": (_seeing({"model_type": "qwen3_5_text"}), r"text_config\.model_type"),
    "Qwen3.5's decoder alone": (
        CONFIGS["Qwen3.5-35B-A3B"]["text_config"],
        "qwen3_5_moe_text.* alone, for which vLLM has no class",
    ),
    "Qwen3.5 without a decoder": (_without(CONFIGS["Qwen3.5-35B-A3B"], "text_config"), r"text_config\.model_type"),
    "Qwen3.5 of two minds about the output layer": (_seeing({}, tie_word_embeddings=True), "tie_word_embeddings"),
    "Qwen3.5 whose decoder alone has one matrix": (_seeing({"tie_word_embeddings": True}), "tie_word_embeddings"),
    "Qwen3.5 with a size beside its decoder": (_seeing({}, num_hidden_layers=39), "num_hidden_layers"),
    "Qwen3.5 in 8 bits": (_seeing({}, quantization_config={"quant_method": "fp8"}), "quantization_config"),
    "Qwen3.5 with drafts": (_seeing({}, speculators_config={"verifier": {}}), "speculators_config"),
    "Qwen3.5 whose experts' weights are not divided": (_seeing({"norm_topk_prob": False}), "norm_topk_prob"),
    "Qwen3.5 with another gate": (_seeing({"output_gate_type": "sigmoid"}), "output_gate_type"),
    "Qwen3.5 with sections for other heads": (
        _seeing({"rope_parameters": _SECTIONS | {"mrope_section": [16, 24, 24]}}),
        "mrope_section",
    ),
    "Qwen3.5 with a layer that slides": (
        _seeing({"layer_types": ["linear_attention"] * 39 + ["sliding_attention"]}),
        "sliding_attention",
    ),
    "Qwen3-Next without experts": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"mlp_only_layers": list(range(48))},
        "mlp_only_layers",
    ),
    "Qwen3-Next with a layer that slides": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"layer_types": ["linear_attention"] * 47 + ["sliding_attention"]},
        "layer_types",
    ),
    "Qwen3-Next with a layer too few": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"layer_types": ["linear_attention"] * 47},
        "layer_types",
    ),
    "Qwen3-Next with attention where vLLM would not have it": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"full_attention_interval": 3},
        "full_attention_interval",
    ),
    "Qwen3-Next whose attention vLLM would not gate": (
        CONFIGS["Qwen3-Next-80B-A3B"] | {"attn_output_gate": False},
        "attn_output_gate",
    ),
    "MiniMax with one expert a token": (CONFIGS["MiniMax-M2"] | {"num_experts_per_tok": 1}, "num_experts_per_tok"),
    "GLM whose groups Megatron-Core ranks by three experts": (
        CONFIGS["GLM-4.5-Air"] | {"n_group": 8, "topk_group": 2, "num_experts_per_tok": 6},
        "topk_group is 2 of n_group 8",
    ),
    "GLM with weights that are no shares": (CONFIGS["GLM-4.5-Air"] | {"norm_topk_prob": False}, "norm_topk_prob"),
    "GLM of dense layers": (CONFIGS["GLM-4.5-Air"] | {"first_k_dense_replace": 46}, "first_k_dense_replace"),
    "GLM without a shared expert": (CONFIGS["GLM-4.5-Air"] | {"n_shared_experts": 0}, "n_shared_experts"),
    "GLM that rotates 45 of 128": (
        CONFIGS["GLM-4.5-Air"] | {"partial_rotary_factor": 0.352},
        "partial_rotary_factor",
    ),
    "deepseek-ai/DeepSeek-V3": (CONFIGS["DeepSeek-V3"] | {"quantization_config": _FP8}, "quantization_config"),
    "DeepSeek that scores by softmax": (CONFIGS["DeepSeek-V3"] | {"scoring_func": "softmax"}, "scoring_func"),
    "DeepSeek without its bias": (_without(CONFIGS["DeepSeek-V3"], "topk_method"), "topk_method"),
    "DeepSeek with experts in every other layer": (CONFIGS["DeepSeek-V3"] | {"moe_layer_freq": 2}, "moe_layer_freq"),
    "deepseek-ai/DeepSeek-V3.2's index": (CONFIGS["DeepSeek-V3"] | {"index_topk": 2048}, "index_topk"),
    "DeepSeek that rotates halves": (CONFIGS["DeepSeek-V3"] | {"rope_interleave": False}, "rope_interleave"),
    "DeepSeek with biases": (CONFIGS["DeepSeek-V3"] | {"attention_bias": True}, "attention_bias"),
    "DeepSeek with fewer keys": (CONFIGS["DeepSeek-V3"] | {"num_key_value_heads": 8}, "num_key_value_heads"),
    "DeepSeek, stretched": (
        CONFIGS["DeepSeek-V3"] | {"rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_type 'linear'",
    ),
    "DeepSeek, scaled by half of it": (
        CONFIGS["DeepSeek-V3"] | {"rope_scaling": _without(CONFIGS["DeepSeek-V3"]["rope_scaling"], "mscale")},
        "rope_parameters.mscale_all_dim",
    ),
    "DeepSeek whose engine would not scale": (
        CONFIGS["DeepSeek-V3"]
        | {"rope_scaling": CONFIGS["DeepSeek-V3"]["rope_scaling"] | {"apply_yarn_scaling": False}},
        "apply_yarn_scaling",
    ),
    "DeepSeek that rotates more than its part": (CONFIGS["DeepSeek-V3"] | {"head_dim": 128}, "head_dim"),
    "DeepSeek whose queries are no sum of their parts": (CONFIGS["DeepSeek-V3"] | {"qk_head_dim": 128}, "qk_head_dim"),
    "DeepSeek that rotates an odd number": (CONFIGS["DeepSeek-V3"] | {"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
    "DeepSeek with two numbers of experts": (CONFIGS["DeepSeek-V3"] | {"num_local_experts": 16}, "num_local_experts"),
    "DeepSeek whose embedding is its head": (CONFIGS["DeepSeek-V3"] | {"tie_word_embeddings": True}, "tie_word_emb"),
    "DeepSeek with dropout": (CONFIGS["DeepSeek-V3"] | {"attention_dropout": 0.1}, "attention_dropout"),
    "DeepSeek with another activation": (CONFIGS["DeepSeek-V3"] | {"hidden_act": "gelu"}, "hidden_act"),
    "DeepSeek without a scale": (CONFIGS["DeepSeek-V3"] | {"routed_scaling_factor": None}, "routed_scaling_factor"),
    "DeepSeek that rotates half": (CONFIGS["DeepSeek-V3"] | {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    "DeepSeek whose yarn is not cut to whole numbers": (
        CONFIGS["DeepSeek-V3"] | {"rope_scaling": CONFIGS["DeepSeek-V3"]["rope_scaling"] | {"truncate": False}},
        "rope_parameters.truncate",
    ),
    "Kimi-K2 with experts of more groups than it has": (CONFIGS["Kimi-K2"] | {"topk_group": 9}, "topk_group is 9"),
    "GLM-4.7-Flash with two sizes of what is rotated": (
        CONFIGS["GLM-4.7-Flash"] | {"head_dim": 192},
        "head_dim is 192 and qk_rope_head_dim 64",
    ),
    "Moonlight with no size of what is rotated": (CONFIGS["Moonlight-16B-A3B"] | {"head_dim": None}, "head_dim"),
    "DeepSeek with a rank that is none": (CONFIGS["DeepSeek-V3"] | {"kv_lora_rank": 0}, "kv_lora_rank"),
    "GLM-4.7-Flash with other dense layers for vLLM": (
        CONFIGS["GLM-4.7-Flash"] | {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 45},
        "first_k_dense_replace",
    ),
    "openai/gpt-oss-20b": (
        CONFIGS["gpt-oss-20b"] | {"quantization_config": {"quant_method": "mxfp4"}},
        "quantization_config",
    ),
    "gpt-oss with windows in its last layers": (
        CONFIGS["gpt-oss-20b"] | {"layer_types": ["full_attention"] * 12 + ["sliding_attention"] * 12},
        "layer_types",
    ),
    "gpt-oss without windows": (CONFIGS["gpt-oss-20b"] | {"sliding_window": None}, "sliding_window"),
    "gpt-oss with another limit": (CONFIGS["gpt-oss-20b"] | {"swiglu_limit": 8.0}, "swiglu_limit"),
    "gpt-oss with another epsilon": (CONFIGS["gpt-oss-20b"] | {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    "gpt-oss without attention's biases": (CONFIGS["gpt-oss-20b"] | {"attention_bias": False}, "attention_bias"),
    "gpt-oss, not stretched": (CONFIGS["gpt-oss-20b"] | {"rope_scaling": {"rope_type": "default"}}, "rope_parameters"),
    "OLMoE, its weights normalised": (CONFIGS["OLMoE-1B-7B"] | {"norm_topk_prob": True}, "norm_topk_prob"),
    "OLMoE with clipped projections": (CONFIGS["OLMoE-1B-7B"] | {"clip_qkv": 8.0}, "clip_qkv"),
    "OLMoE clipped to nothing": (CONFIGS["OLMoE-1B-7B"] | {"clip_qkv": 0.0}, "clip_qkv"),
    "OLMoE with an epsilon that vLLM does not read": (CONFIGS["OLMoE-1B-7B"] | {"rms_norm_eps": 1e-6}, "rms_norm_eps"),
    "Qwen/Qwen2-57B-A14B-Instruct": (_QWEN2 | {"model_type": "qwen2_moe"}, "model_type"),
}
"""And the field that is named."""
