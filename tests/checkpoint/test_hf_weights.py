"""Weights in unusual but sound Hugging Face folders, and numbers that a type cannot hold."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatron_dppo.checkpoint.hf_files import HFFiles, converted
from megatron_dppo.errors import UserError
from megatron_dppo.models.packed_logits import packed_logits
from tests.checkpoint.test_hf_faults import check
from tests.distributed import run_ranks
from tests.megatron import build_from
from tests.tiny import VOCAB_SIZE, tiny_model


def change(folder: Path, **tensors: torch.Tensor) -> None:
    """Other tensors in the one file of `folder`; a name's dots are written as two underscores."""
    file = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file(load_file(file) | named, file, metadata={"format": "pt"})


def test_a_tied_model_may_store_its_matrix_under_both_names(tmp_path: Path) -> None:
    tiny_model("llama", tmp_path, tie_word_embeddings=True, num_hidden_layers=1)
    head = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"].clone()
    change(tmp_path, lm_head__weight=head)
    check(tmp_path)
    head[299, 5] += 1e-3
    change(tmp_path, lm_head__weight=head)
    with pytest.raises(UserError, match=r"stores lm_head\.weight, which differs .* in row 299, .*tie_word_embeddings"):
        check(tmp_path)
    change(tmp_path, lm_head__weight=head[:200].clone())
    with pytest.raises(UserError, match=r"wrong shape: lm_head\.weight \(200, 64\)"):
        check(tmp_path)


def logits_of(rank: int, folder: Path, ids: torch.Tensor) -> np.ndarray:
    chunks, _, _ = build_from(folder, {})
    (logits,) = packed_logits(chunks, [(ids, [len(ids)])])
    return logits[:, :VOCAB_SIZE].numpy()


def test_frequencies_are_no_weights_and_a_router_may_be_finer_than_the_rest(tmp_path: Path) -> None:
    """As transformers reads it: Llama's early files hold rotary_emb.inv_freq of each layer, and some keep routers in
    float32 among bfloat16."""
    model = tiny_model("qwen3_moe", tmp_path, num_hidden_layers=2, dtype=torch.bfloat16)
    gate = 0.1 * torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    assert (gate.bfloat16() != gate).any()
    change(
        tmp_path,
        model__layers__1__mlp__gate__weight=gate,
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(16),
        model__rotary_emb__inv_freq=torch.ones(16, dtype=torch.float64),
    )
    check(tmp_path)
    assert HFFiles(tmp_path).dtype == torch.bfloat16
    ids = torch.randint(0, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(1))
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.equal(model.model.layers[1].mlp.gate.weight, gate)
    with torch.no_grad():
        right = model(ids[None]).logits[0].numpy()
    np.testing.assert_allclose(run_ranks(logits_of, 1, tmp_path, ids)[0], right, atol=1e-4, rtol=0)


def test_numbers_beyond_the_range_of_a_type_are_refused_by_tensor() -> None:
    large = torch.tensor([1.0, -7e4, torch.inf, 65504.0])
    with pytest.raises(
        UserError, match=r"a\.weight has 1 numbers of 4 that are inf as float16 \(the largest is 7e\+04"
    ):
        converted("a.weight", large, torch.float16)
    assert converted("a.weight", large, torch.float16, allow_inf=True).isinf().tolist() == [False, True, True, False]
    assert converted("a.weight", large, torch.bfloat16)[1].isfinite()
    assert converted("a.weight", large[2:], torch.float16)[0] == torch.inf  # it was inf before
