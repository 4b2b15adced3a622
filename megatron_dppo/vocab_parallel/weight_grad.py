"""Where the gradient of the LM head goes: Megatron's ``main_grad`` if the weight has one, else an ordinary gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dppo.vocab_parallel.matmul import add_product, write_product


class WeightGrad:
    """Receives ``dW[j0:j1] = dz^T hidden`` chunk by chunk.

    With ``weight.main_grad`` (Megatron's DDP) chunks are added straight to it, as Megatron's own linear layer does with
    ``gradient_accumulation_fusion``: ``grad_added_to_main_grad`` is set so that DDP's hook does not add again, and the
    gradient returned to autograd is a dummy that only makes the hook run. Where the weight is tied on this stage
    (``zero_out_wgrad``), the hook does add what autograd summed, the embedding's gradient plus the dummy, so the dummy
    is zeros. Without ``main_grad``, or under Megatron-FSDP which makes it on demand, the gradient itself is returned in
    the weight's type.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        main_grad = getattr(weight, "main_grad", None)
        fused = main_grad is not None and hasattr(weight, "grad_added_to_main_grad")
        self.main_grad = main_grad if fused and not hasattr(weight, "__fsdp_param__") else None
        self.grad = torch.empty_like(weight) if self.main_grad is None else None
        self._written = 0

    @torch.no_grad()
    def add(self, j0: int, j1: int, dz: Tensor, hidden: Tensor) -> None:
        """Rows ``[j0, j1)``, each once a backward and in rising order: ``dz[N, j1 - j0]^T hidden[N, H]``."""
        assert j0 == self._written
        self._written = j1
        if self.main_grad is not None:
            add_product(self.main_grad[j0:j1], dz.t(), hidden)
        elif self.grad is not None:
            write_product(self.grad[j0:j1], dz.t(), hidden)

    def result(self) -> Tensor:
        """What the backward returns for the weight. Called also when no row was added, so that hooks always run."""
        if self.grad is not None:
            # What no chunk wrote: padding, or everything where no row is left.
            self.grad[self._written :].zero_()
            return self.grad
        self.weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        if getattr(self.weight, "zero_out_wgrad", False):
            return torch.zeros_like(self.weight)
        return torch.empty_like(self.weight)
