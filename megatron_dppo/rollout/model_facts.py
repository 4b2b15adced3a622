"""What an engine must know of a checkpoint beforehand."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.router_replay.record import RouteSchema


@dataclass(frozen=True)
class ModelFacts:
    """Read from the folder's JSON files alone."""

    folder: Path
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    """The model's own end-of-sequence ids: config.json's and generation_config.json's."""
    tied_embeddings: bool
    routes: RouteSchema | None
    """None for a model without experts, or when routes are not recorded."""
    experts: int
    """Per layer that has some; 0 for a model without."""
    experts_per_token: int

    @staticmethod
    def read(folder: Path, *, router_replay: bool) -> ModelFacts:
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except FileNotFoundError as error:
            raise UserError(
                f"{path}: no such file; model.path must be a folder with a Hugging Face checkpoint"
            ) from error
        except ValueError as error:
            raise UserError(f"{path}: not valid JSON ({error})") from error
        generation = folder / "generation_config.json"
        declared = [config.get("eos_token_id")]
        if generation.exists():
            declared.append(json.loads(generation.read_text()).get("eos_token_id"))
        ids = [i for entry in declared for i in (entry if isinstance(entry, list) else [entry]) if i is not None]
        return ModelFacts(
            folder=folder,
            vocab_size=int(config["vocab_size"]),
            stop_token_ids=tuple(sorted(set(ids))),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            routes=RouteSchema.from_hf_config(config) if router_replay else None,
            experts=int(config.get("num_experts") or config.get("num_local_experts") or 0),
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
        )
