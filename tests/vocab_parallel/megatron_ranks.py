"""What every rank does in the Megatron-Core tests: a few training steps with TokenStats as the model's output, and the
same steps through Megatron-Core's own output layer, whose logits the reference turns into statistics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_dppo.vocab_parallel import (
    TokenStats,
    TokenStatsRequest,
    VocabShard,
    token_stats_processor,
)
from tests.megatron import build_from
from tests.vocab_parallel.reference import token_stats_from_logits

TOKENS, MICROBATCHES, STEPS = 16, 3, 2


def microbatches(data_rank: int, step: int, vocab_size: int) -> list[dict[str, Tensor]]:
    """Two sequences of 8 tokens each. The second data-parallel rank's first microbatches have no row that counts, in
    the second step all of them."""
    generator = torch.Generator().manual_seed(100 * step + data_rank)
    batches = []
    for index in range(MICROBATCHES):
        none = data_rank == 1 and (step == 1 or index < 2)
        batches.append(
            {
                "input": torch.randint(vocab_size, (2, TOKENS // 2), generator=generator),
                "token_ids": torch.randint(vocab_size, (TOKENS,), generator=generator),
                "topk_ids": torch.randint(-1, vocab_size, (TOKENS, 3), generator=generator),
                "mask": (torch.rand(TOKENS, generator=generator) < 0.7) & (not none),
                "weight": torch.randn(2, TOKENS, generator=generator),
            }
        )
    return batches


def train(path: Path, layout: dict[str, Any], hook: bool) -> dict[str, Tensor]:
    """Weights and every microbatch's TokenStats after two Adam steps under DDP with overlap and sharded optimizer."""
    (model,), hf, groups = build_from(path, layout)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=20_000
    )
    model.config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    model.config.no_sync_func = ddp.no_sync
    model.config.grad_sync_func = None
    # A large epsilon makes Adam's step proportional to the gradient, so that equal weights mean equal gradients.
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=100.0, adam_eps=1e3, weight_decay=0.0, clip_grad=0.0, use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
        [ddp],
    )  # fmt: skip
    outputs: dict[str, Tensor] = {}

    def forward_step(data: Iterator[dict[str, Tensor]], chunk: torch.nn.Module) -> tuple[Any, Any]:
        batch = next(data)
        positions = torch.arange(TOKENS // 2).expand(2, -1)
        attention_mask = torch.ones(1, 1, TOKENS // 2, TOKENS // 2).triu(1).bool()
        options: dict[str, Any] = {}
        if hook:
            request = TokenStatsRequest(
                token_ids=batch["token_ids"],
                topk_ids=batch["topk_ids"],
                loss_mask=batch["mask"],
                vocab_size=hf.vocab_size,
                group=groups.tp,
                temperature=0.9,
            )
            options = {"output_processor": token_stats_processor, "output_processor_context": request}
        out = chunk(batch["input"], positions, attention_mask, **options)

        def loss(out: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            stats = out if hook else reference(out, batch)
            assert stats.topk_logp is not None
            mask = batch["mask"]
            name = f"stats {len(outputs)}"
            columns = [stats.logp[:, None], stats.entropy[:, None], stats.topk_logp]
            outputs[name] = torch.cat(columns, dim=1).detach()[mask]
            value = ((batch["weight"][0] * stats.logp + 0.1 * batch["weight"][1] * stats.entropy) * mask).sum()
            value = value + (0.2 * stats.topk_logp.exp().sum(1) * mask).sum()
            return value, torch.tensor(1, dtype=torch.int), {}

        return out, loss

    def reference(logits: Tensor, batch: dict[str, Tensor]) -> TokenStats:
        local = logits.transpose(0, 1).reshape(TOKENS, -1)  # sequence-major rows, as the hook's
        shard = VocabShard.even(local.shape[1], hf.vocab_size, groups.tp)
        return token_stats_from_logits(local, batch["token_ids"], batch["topk_ids"], shard=shard, temperature=0.9)

    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(microbatches(groups.dp.rank(), step, hf.vocab_size)),
            model=ddp,
            num_microbatches=MICROBATCHES,
            seq_length=TOKENS // 2,
            micro_batch_size=2,
            forward_only=False,
        )
        assert optimizer.step()[0]
    ddp.start_param_sync(force_sync=True)
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return weights | outputs


def hook_equals_own_output_layer(rank: int, cases: list[tuple[Path, dict[str, Any]]]) -> None:
    for path, layout in cases:
        got, expected = train(path, layout, True), train(path, layout, False)
        (initial,), _, _ = build_from(path, layout)
        assert got.keys() == expected.keys()
        last_stage = parallel_state.is_pipeline_last_stage()
        assert any(name.startswith("stats") for name in got) == last_stage
        moved = 0
        for name, parameter in initial.named_parameters():
            change = expected[name] - parameter.detach()
            moved += bool(change.abs().max() > 1e-4)
            torch.testing.assert_close(
                got[name] - parameter.detach(),
                change,
                rtol=1e-3,
                atol=2e-5 * max(1.0, change.abs().max().item()),
                msg=lambda text, n=name, where=layout: f"{where} {n}: {text}",
            )
        assert moved >= len(list(initial.parameters())) - 1, f"{layout}: only {moved} weights moved"
        for name in got:
            if name.startswith("stats"):
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)
