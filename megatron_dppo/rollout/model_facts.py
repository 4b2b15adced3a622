"""What an engine must know of a checkpoint beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.hf_config import refuse_absurd_sizes
from megatron_dppo.router_replay.record import RouteSchema

_SIZES = ("vocab_size", "num_hidden_layers", "num_experts", "num_local_experts", "num_experts_per_tok",
          "decoder_sparse_step")  # fmt: skip


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
        path, generation = folder / "config.json", folder / "generation_config.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; model.path must be a folder with a Hugging Face checkpoint")
        config = read_json_object(path)
        for name in _SIZES:
            if (size := config.get(name)) is not None and type(size) is not int:
                raise UserError(f"{path}: {name} is {size!r:.80}; it must be a whole number")
        refuse_absurd_sizes(config, str(path))
        if (vocab_size := config.get("vocab_size") or 0) < 1:
            raise UserError(f"{path}: vocab_size is {vocab_size}; it must be above 0")
        stop = {i for file in (path, generation) if file.is_file() for i in _end_ids(file)}
        try:
            routes = RouteSchema.from_hf_config(config) if router_replay else None
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(f"{path} does not describe its expert layers: {error!r}; correct it") from None
        return ModelFacts(
            folder=folder,
            vocab_size=vocab_size,
            stop_token_ids=tuple(sorted(stop)),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            routes=routes,
            experts=config.get("num_experts") or config.get("num_local_experts") or 0,
            experts_per_token=config.get("num_experts_per_tok") or 0,
        )


def _end_ids(file: Path) -> list[int]:
    declared = read_json_object(file).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    for token in ids:
        if type(token) is not int:
            raise UserError(f"{file}: eos_token_id has {token!r}, which is no token id; correct it")
    return ids
