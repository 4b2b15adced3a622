"""Real Megatron-Core on a CPU with gloo."""

from __future__ import annotations

import logging
import warnings

import torch

_installed = False


def install() -> None:
    """Make Megatron-Core run on CPU tensors and gloo groups; does nothing where CUDA is available.

    Call it in every process before a model is built. It patches `torch.cuda`'s random state, streams and device
    queries, turns CUDA literals inside Megatron-Core into the CPU, lets gloo groups share a device, and mends what was
    only ever run with NCCL and TransformerEngine: token-dispatcher splits, uneven collectives and the checkpointing of
    torch's Adam. `torch.compile` is off: one-core compilation costs more than it gains.
    """
    global _installed
    if _installed or torch.cuda.is_available():
        return
    from megatron_dppo.compat.cuda_on_cpu import patch_cuda_literals, patch_torch_cuda

    patch_torch_cuda()
    patch_cuda_literals()
    torch._dynamo.config.disable = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Apex is not installed", "Transformer Engine is not installed": known here
        from megatron_dppo.compat.megatron_gaps import (
            patch_collectives,
            patch_distributed_optimizer,
            patch_token_dispatcher,
            share_gloo_devices,
        )

    _patch_random()
    share_gloo_devices()
    patch_collectives()
    patch_token_dispatcher()
    patch_distributed_optimizer()
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    _installed = True


def _patch_random() -> None:
    """The stock setter hands its work to torch's queue for a GPU that never comes, so the state would never be set."""
    from megatron.core.tensor_parallel import random

    def set_state(new_state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    random._set_cuda_rng_state = set_state
