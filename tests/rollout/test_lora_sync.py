"""vLLM with the merged weights of sharded adapters, against transformers + PEFT with the adapters beside the base."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.distributed import run_ranks
from tests.peft_adapters import with_peft, write_adapter
from tests.rollout.conftest import SAMPLING, Served, only_vllm, requests
from tests.rollout.lora_ranks import export_merged
from tests.rollout.reference import compare_law, compare_routes, load, reference


@only_vllm
def test_synced_adapters_equal_peft(served: Served, tmp_path: Path) -> None:
    base = load(served.model)
    write_adapter(tmp_path / "adapter", base)
    layout, file = {"tensor": 2, "expert": 2, "sequence_parallel": True}, tmp_path / "merged.safetensors"
    run_ranks(export_merged, 2, served.model, layout, tmp_path / "adapter", file)
    served.update(served.next_version(), load_file(file).items())
    batch = served.engine.generate(requests(40, "adapters", 11), SAMPLING, training=True)

    adapted = with_peft(base, tmp_path / "adapter", dtype=torch.float32).get_base_model()
    expected = reference(adapted, batch)
    assert compare_law(batch, expected) <= 1e-4
    assert compare_law(batch, reference(base, batch)) > 0.1, "the adapters did nothing"
    _, mismatches, _ = compare_routes(batch, expected)
    assert mismatches == 0
