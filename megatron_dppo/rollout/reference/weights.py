"""Weights of transformers' modules: from a folder, and from the buckets of a sync."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from megatron_dppo.checkpoint.weight_layout import TensorSlot, unpack
from megatron_dppo.errors import UserError, first_line
from megatron_dppo.models.family import transformers_config
from megatron_dppo.rollout.config import RolloutConfig
from megatron_dppo.rollout.weight_transfer.manifest import IncompleteSync
from megatron_dppo.vocab_parallel.matmul import product


def load_model(folder: Path, config: RolloutConfig, device: torch.device) -> PreTrainedModel:
    """transformers' own class for the model type, never code from the folder. Raises `UserError` where there is none,
    or the folder holds no weights for it."""
    transformers_logging.disable_progress_bar()
    try:
        found = transformers_config(folder)
    except (ValueError, OSError) as error:
        raise UserError(f"{folder}/config.json: transformers has no class for it ({first_line(error)})") from error
    if getattr(found, "quantization_config", None) is not None:
        raise UserError(
            f"{folder}/config.json has a quantization_config, and rollout.engine=reference computes in "
            "rollout.dtype alone; give a folder of plain weights (`megatron-dppo convert` writes one)"
        )
    dtype = "auto" if config.dtype == "auto" else getattr(torch, config.dtype)
    try:
        if config.load_format == "dummy":
            made = AutoModelForCausalLM.from_config(
                found, dtype=found.dtype or torch.float32 if dtype == "auto" else dtype, trust_remote_code=False
            )
        else:
            made, info = AutoModelForCausalLM.from_pretrained(
                folder, config=found, dtype=dtype, trust_remote_code=False, output_loading_info=True
            )
            if missing := _lacking(info):
                raise UserError(f"{folder}: the weights are not those of {type(made).__name__}: {missing}")
    except (ValueError, OSError) as error:
        raise UserError(f"{folder} cannot be loaded by transformers: {first_line(error)}") from error
    _keep_logits(made)
    return made.to(device).eval().requires_grad_(False)


def _keep_logits(model: PreTrainedModel) -> None:
    """Let logits be float32, as the trainer's are: transformers rounds them to the type of the weights."""
    head = model.get_output_embeddings()

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        logits = product(hidden.flatten(0, -2), head.weight.t()).unflatten(0, hidden.shape[:-1])
        return logits if head.bias is None else logits + head.bias

    head.forward = forward


class IncomingWeights:
    """The tensors of one sync by Hugging Face name, until all have come and transformers makes its own of them.

    Memory, on the host: the model twice while a sync ends. The model's own tensors stay where they are.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._came: dict[str, torch.Tensor] = {}

    def begin(self) -> None:
        self._came = {}

    def load(self, slots: Iterable[TensorSlot], payload: torch.Tensor) -> None:
        """Keep copies of a bucket's tensors."""
        for slot, tensor in unpack(slots, payload):
            kept = tensor.to("cpu", copy=True)
            self._came |= zip(slot.names(), [kept] if slot.experts is None else kept.unbind(), strict=True)

    @torch.no_grad()
    def finish(self) -> None:
        """The model has the weights. Raises `IncompleteSync` where transformers lacks some."""
        model, came = self._model, self._came
        self._came = {}
        made, info = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=came, dtype=model.dtype, output_loading_info=True
        )
        if missing := _lacking(info):
            raise IncompleteSync(f"the tensors that came are not those of {type(model).__name__}: {missing}")
        live = model.state_dict()
        for name, tensor in made.state_dict().items():
            live[name].copy_(tensor)


def give_back(model: PreTrainedModel, device: str) -> None:
    """Take the model's parameters to `device`, without their values: "meta" frees their memory."""
    moved: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in moved:
                empty = torch.empty_like(parameter, device=device)
                moved[id(parameter)] = torch.nn.Parameter(empty, requires_grad=False)
            setattr(module, name, moved[id(parameter)])


def _lacking(info: dict[str, object]) -> str:
    """What transformers says that a model did not get, or in another shape; "" where all is well."""
    for key in ("missing_keys", "mismatched_keys", "error_msgs"):
        if found := info.get(key):
            return f"{key} {sorted(str(one) for one in found)[:4]}"  # type: ignore[attr-defined]
    return ""
