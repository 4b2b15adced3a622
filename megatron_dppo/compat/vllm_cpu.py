"""vLLM on a machine without a GPU: router-replay capture, experts that are divided among workers, a tied head. With
which options its engine starts there says `rollout/vllm/start.py`.

Facts of vLLM 0.26 that this module answers:
- the CPU mixture-of-experts kernels choose experts in `cpu_fused_moe.select_experts`, which never calls the capture
  function that the router of the layer holds, so recorded routes come out all zero;
- there sigmoid scores and a correction bias are known to the choice from groups of experts alone (MiniMax-M2: "assert
  scoring_func == 'softmax'");
- its grouped product of experts takes rows of gate and up together in 64s, and is chosen for any multiple of 32: an
  engine with experts of 48 dies at its start (a failed check in cpu_fused_moe.cpp, or "double free");
- the same kernels take the ids of experts for places among their own weights, which under expert parallelism are those
  of a part of the experts only;
- linear layers multiply by a packed copy of their weight, and reloading weights packs anew only the layers that a
  weight was loaded into: a head tied to the embedding keeps the old copy (5.8 nats off after a weight sync);
- it has no latent attention ("MLA is not supported on CPU"): VLLM_MLA_DISABLE=1, which `rollout/vllm/start.py` sets,
  makes keys and values of the latent vectors first, the same function;
- the kernel that rotates queries and keys takes `[tokens, heads * dimensions]`; given `[tokens, heads, dimensions]`, as
  by latent attention, it rotates the first head alone (0.77 off).
"""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner


def on_cpu() -> bool:
    """Whether vLLM's platform in this process is the CPU."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def repack_tied_head(model: torch.nn.Module) -> None:
    """After weights were reloaded, pack heads anew whose weight is the embedding's. Does nothing on a GPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    if not on_cpu():
        return
    layers = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {id(m.weight) for m in layers if not isinstance(m, ParallelLMHead)}
    for head in layers:
        if isinstance(head, ParallelLMHead) and id(head.weight) in embeddings:
            head.quant_method.process_weights_after_loading(head)


def mend_rotation() -> None:
    """Let torch rotate queries and keys that come head by head. Idempotent."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kernel = RotaryEmbedding.forward_cpu
    if getattr(kernel, "mended", False):
        return

    @functools.wraps(kernel)
    def forward(self: Any, positions: torch.Tensor, query: torch.Tensor, key: Any = None, *more: Any) -> Any:
        rotate = self.forward_native if query.ndim > 2 else functools.partial(kernel, self)
        return rotate(positions, query, key, *more)

    forward.mended = True  # type: ignore[attr-defined]
    RotaryEmbedding.forward_cpu = forward


def mend_expert_sizes() -> None:
    """Let torch multiply experts of sizes that the grouped product does not take. Idempotent."""
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    check = CPUFusedMOE.check_grouped_gemm
    if getattr(check, "mended", False):
        return

    @functools.wraps(check)
    def check_sizes(self: Any, layer: Any) -> tuple[bool, str]:
        return check(self, layer) if layer.w13_weight.size(1) % 64 == 0 else (False, "none")

    check_sizes.mended = True  # type: ignore[attr-defined]
    CPUFusedMOE.check_grouped_gemm = check_sizes


def mend_expert_choice() -> None:
    """Let the CPU kernels report the experts they choose to the router of their layer, and compute those that are this
    worker's. Idempotent.

    Two functions are wrapped: the layer's forward notes which layer is at work, and `select_experts` hands its ids
    `[tokens, topk]` to the capture function that vLLM's own recorder put on that layer's router; then they become
    `own_experts`. Without expert parallelism no number changes. Sigmoid scores without groups are a choice from one
    group of all experts.
    """
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    if getattr(cpu_fused_moe.select_experts, "mended", False):
        return
    at_work: list[MoERunner] = []
    apply_layer, select_experts = MoERunner._apply_quant_method, cpu_fused_moe.select_experts
    signature = inspect.signature(select_experts)

    @functools.wraps(apply_layer)
    def apply_and_note_layer(self: MoERunner, *args: Any, **kwargs: Any) -> Any:
        at_work.append(self)
        try:
            return apply_layer(self, *args, **kwargs)
        finally:
            at_work.pop()

    @functools.wraps(select_experts)
    def select_and_report(*args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        asked = signature.bind(*args, **kwargs).arguments
        if asked.get("scoring_func") == "sigmoid" and not asked["use_grouped_topk"]:
            one_group = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
            args, kwargs = (), asked | one_group
        weights, ids = select_experts(*args, **kwargs)
        if not at_work:
            return weights, ids
        router: Any = at_work[-1].router
        if router.capture_fn is not None:
            router.capture_fn(ids)
        expert_map = at_work[-1].routed_experts.expert_map
        return (weights, ids) if expert_map is None else own_experts(weights, ids, expert_map)

    select_and_report.mended = True  # type: ignore[attr-defined]
    MoERunner._apply_quant_method = apply_and_note_layer
    cpu_fused_moe.select_experts = select_and_report


def own_experts(
    weights: torch.Tensor, ids: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """A choice among all experts as a choice among this worker's; the sum over workers is the layer's output.

    weights, ids  `[tokens, topk]`; ids differ in each row
    expert_map    `[experts]`, the place of each among this worker's, -1 for another worker's; it has at least `topk`

    Places differ in each row as well, since a kernel counts an expert once a token: where another worker's was chosen
    stands one that was not, with weight 0.
    """
    import torch

    places = expert_map[ids.long()].long()
    own, count = places >= 0, int(expert_map.max()) + 1
    chosen = torch.zeros(len(ids), count + 1, dtype=torch.int32, device=ids.device)
    chosen.scatter_(1, torch.where(own, places, count), 1)
    spare = chosen[:, :count].argsort(dim=1, stable=True)  # those that were not chosen come first
    number = ((~own).cumsum(dim=1) - 1).clamp(min=0)
    return weights * own, torch.where(own, places, spare.gather(1, number)).to(ids.dtype)
