"""What an engine must know of a checkpoint beforehand."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.models.family import text_fields
from megatron_dppo.models.hf_config import HFConfig, family_of, resolve_hf_config
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
    model: HFConfig | None
    """None for a model of no family, and for one with quantized weights. Its tensors are those that a weight sync
    brings: a checkpoint may hold others beside them, or all experts of a layer in one."""

    @staticmethod
    def read(folder: Path, *, router_replay: bool) -> ModelFacts:
        """What a family says of the folder's model. Without routes, an engine may also serve a model of no family (in
        an evaluation); its experts are then not known."""
        path, generation = folder / "config.json", folder / "generation_config.json"
        if not path.is_file():
            raise UserError(f"{path}: no such file; model.path must be a folder with a Hugging Face checkpoint")
        raw = read_json_object(path)
        stop = {i for file in (path, generation) if file.is_file() for i in _end_ids(file)}
        model: HFConfig | None = None
        if router_replay or (family_of(raw) is not None and not raw.get("quantization_config")):
            model = resolve_hf_config(raw, path=folder)
            vocab_size, tied = model.vocab_size, model.tied
        else:
            raw = text_fields(raw)
            size = raw.get("vocab_size")
            if type(size) is not int or size < 1:
                raise UserError(f"{path}: vocab_size is {size!r:.80}; it must be a whole number above 0")
            vocab_size, tied = size, bool(raw.get("tie_word_embeddings"))
        return ModelFacts(
            folder=folder,
            vocab_size=vocab_size,
            stop_token_ids=tuple(sorted(stop)),
            tied_embeddings=tied,
            routes=model.routes if model and router_replay else None,
            model=model,
        )


def check_end(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where no token ends a response."""
    if not facts.stop_token_ids and not config.stop_token_ids:
        raise UserError(
            f"{facts.folder}/config.json names no eos_token_id, so no response would end before "
            f"{config.max_response_tokens} tokens; set rollout.stop_token_ids"
        )


def check_lengths(model: HFConfig, config: RolloutConfig) -> None:
    """Raise `UserError` where sequences may become longer than the model's positions."""
    if config.max_model_len > model.positions:
        raise UserError(
            f"prompts and responses reach {config.max_model_len} tokens (rollout.max_prompt_tokens and "
            f"rollout.max_response_tokens), the positions of the model {model.positions}; lower "
            "rollout.max_response_tokens"
        )


def check_expert_parallel(facts: ModelFacts, config: RolloutConfig) -> None:
    """Raise `UserError` where `rollout.expert_parallel` does not fit the model."""
    if not config.expert_parallel:
        return
    where = f"rollout.expert_parallel=true: {facts.folder}"
    if facts.model is None or facts.model.moe is None:
        raise UserError(f"{where} has no experts; set it to false")
    if (experts := facts.model.moe.experts) < config.tensor_parallel:
        raise UserError(
            f"{where} has {experts} experts, fewer than rollout.tensor_parallel={config.tensor_parallel}; lower "
            "the latter"
        )


def _end_ids(file: Path) -> list[int]:
    declared = text_fields(read_json_object(file)).get("eos_token_id")
    ids = declared if isinstance(declared, list) else [] if declared is None else [declared]
    for token in ids:
        if type(token) is not int:
            raise UserError(f"{file}: eos_token_id has {token!r}, which is no token id; correct it")
    return ids
