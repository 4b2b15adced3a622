#!/usr/bin/env python3
"""Write the folder of a model of Qwen3-30B-A3B's shapes that has no weights: config.json and a byte-level tokenizer.

    python examples/paper/make_shapes.py OUT [--layers N]

A run with `model.random_weights=true` draws the weights itself. The figures are the model's public ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.tiny_moe_dppo.model import byte_tokenizer
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import new_folder, whole

LAYERS = 48
SHAPES: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
"""What its config.json says of the shapes, the number of layers aside."""


def qwen3_30b_a3b(tokenizer: PreTrainedTokenizerBase, layers: int = LAYERS) -> dict[str, Any]:
    """Content of a config.json: 48 layers (or `layers`), hidden size 2,048, 32 heads over 4 key-value heads of 128,
    128 experts of 768 of which 8 run, vocabulary 151,936, untied. `tokenizer` names the ids that end and pad."""
    return SHAPES | {
        "num_hidden_layers": layers,
        "max_position_embeddings": 32768,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def write_folder(folder: Path, config: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """A model folder without weights: tokenizer and, last, config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_folder, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--layers", type=whole(1, LAYERS + 1), default=LAYERS, help=f"of the model (default {LAYERS})")
    arguments = parser.parse_args(argv)
    return exit_status(lambda: make(arguments.out, arguments.layers))


def make(out: Path, layers: int) -> None:
    """Write the folder."""
    tokenizer = byte_tokenizer()
    write_folder(out, qwen3_30b_a3b(tokenizer, layers), tokenizer)


if __name__ == "__main__":
    raise SystemExit(main())
