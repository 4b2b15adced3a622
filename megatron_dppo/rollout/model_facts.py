"""What an engine must know of a checkpoint beforehand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.hf_config import family_of, resolve_hf_config
from megatron_dppo.models.names import Shape
from megatron_dppo.rollout.config import RolloutConfig
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
    tensors: Mapping[str, Shape] | None = None
    """Those that a weight sync brings, by a family that knows the model: a checkpoint may hold others beside them, or
    all experts of a layer in one."""
    delta_rule: bool = False
    """Whether layers have a gated delta rule in place of attention."""
    sinks: bool = False
    """Whether attention has sinks."""
    latent_norm_eps: float | None = None
    """Epsilon of the norms of latent vectors; None where keys and values are made of none."""

    @staticmethod
    def read(folder: Path, *, router_replay: bool) -> ModelFacts:
        """What a family says of the folder's model. Without routes, an engine may also serve a model of no family (in
        an evaluation); its experts are then not known."""
        path, generation = folder / "config.json", folder / "generation_config.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; model.path must be a folder with a Hugging Face checkpoint")
        raw = read_json_object(path)
        stop = {i for file in (path, generation) if file.is_file() for i in _end_ids(file)}
        if router_replay or (family_of(raw) is not None and not raw.get("quantization_config")):
            model = resolve_hf_config(raw, path=folder)
            vocab_size, tied, moe = model.vocab_size, model.tied, model.moe
            delta_rule, sinks = model.delta is not None, model.sinks
            latent = model.latent
            tensors: Mapping[str, Shape] | None = model.tensors
            routes = model.routes if router_replay else None
        else:
            raw = text_fields(raw)
            size = raw.get("vocab_size")
            if type(size) is not int or size < 1:
                raise UserError(f"{path}: vocab_size is {size!r:.80}; it must be a whole number above 0")
            vocab_size, tied, moe, routes = size, bool(raw.get("tie_word_embeddings")), None, None
            delta_rule = sinks = False
            tensors = None
            latent = None
        return ModelFacts(
            folder=folder,
            vocab_size=vocab_size,
            stop_token_ids=tuple(sorted(stop)),
            tied_embeddings=tied,
            routes=routes,
            experts=moe.experts if moe else 0,
            experts_per_token=moe.topk if moe else 0,
            tensors=tensors,
            delta_rule=delta_rule,
            sinks=sinks,
            latent_norm_eps=latent.norm_eps if latent else None,
        )


def check_end(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where no token ends a response."""
    if not facts.stop_token_ids and not config.stop_token_ids:
        raise UserError(
            f"{facts.folder}/config.json names no eos_token_id, so no response would end before "
            f"{config.max_response_tokens} tokens; set rollout.stop_token_ids"
        )


def check_expert_parallel(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where `rollout.expert_parallel` does not fit the model."""
    if not config.expert_parallel:
        return
    where = f"rollout.expert_parallel=true: {facts.folder}"
    if facts.experts == 0:
        raise UserError(f"{where} has no experts; set it to false")
    if facts.experts < config.tensor_parallel:
        raise UserError(
            f"{where} has {facts.experts} experts, fewer than rollout.tensor_parallel={config.tensor_parallel}; lower "
            "the latter"
        )


def _end_ids(file: Path) -> list[int]:
    declared = text_fields(read_json_object(file)).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    for token in ids:
        if type(token) is not int:
            raise UserError(f"{file}: eos_token_id has {token!r}, which is no token id; correct it")
    return ids
