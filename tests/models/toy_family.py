"""A family that an installed package brings, and what a process that finds it does: the logits, the export, and what is
derived. Run as a script, since a process looks for families once."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from megatron_dppo.models.flops import training_flops
from megatron_dppo.models.hf_config import load_hf_config
from megatron_dppo.planner.parameters import exported
from megatron_dppo.rollout.model_facts import ModelFacts
from tests.checkpoint.round_trip import check_round_trip
from tests.distributed import run_ranks

PACKAGE = """
import sys

from megatron_dppo.models.families.decoder import decoder
from megatron_dppo.models.families.tables import ATTENTION, DENSE_MLP
from megatron_dppo.models.family import Family

FAMILY = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    read=decoder,
    layer=lambda model, layer: {**ATTENTION, **DENSE_MLP},
    aliases=("toy",),
    spec="toy_family:spec",
)
CALLED = []


def spec(block, model, groups):
    print("spec of", len(block.layer_specs), "layers of", model.hidden_size, "on", groups.tp.size(), file=sys.stderr)
"""


def install(folder: Path, package: str = PACKAGE, value: str = "toy_family:FAMILY") -> None:
    """What `pip install` of the package leaves."""
    (folder / "toy_family.py").write_text(package)
    info = folder / "toy_family-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-family\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[megatron_dppo.families]\ntoy = {value}\n")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    model = load_hf_config(path)
    ((error, equal),) = run_ranks(check_round_trip, 1, {}, [path])[0].values()
    print(json.dumps({
        "family": model.family.model_type,
        "error": error,
        "equal": equal,
        "tensors": len(model.tensors),
        "parameters": exported(model),
        "flops": training_flops(model, [1]),
        "routes": ModelFacts.read(path, router_replay=True).routes,
    }))  # fmt: skip
