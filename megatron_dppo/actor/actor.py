"""The Megatron actor: what a rank of the training job does with a rollout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_dppo.actor.aux_losses import AuxiliaryLosses
from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.actor.gradient_reduction import reduce_in_bfloat16
from megatron_dppo.actor.layers import fuse_weight_gradients, release_dispatched
from megatron_dppo.actor.microbatch import Microbatch
from megatron_dppo.actor.multi_tensor import prepare_step
from megatron_dppo.actor.objective import MicrobatchReport, MiniBatchObjective, Recomputed, collect, kl_of_rows
from megatron_dppo.actor.offload import PARTS, Offloader, Part
from megatron_dppo.actor.optimizer import build_optimizer, guarded_step
from megatron_dppo.actor.passes import Passes
from megatron_dppo.actor.profiling import Phases
from megatron_dppo.actor.reduce import BlockedTokens, StepTotals, gather_rows, reduce_bytes, reduce_losses
from megatron_dppo.actor.reference_policy import ReferencePolicy
from megatron_dppo.actor.results import ParityReport, ProgressTeller, UpdateProgress, UpdateReport
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.actor.signal import TrainingSignal
from megatron_dppo.algorithm import (
    Denominators,
    KLEstimator,
    KLPlace,
    Preset,
    ReferenceKL,
    TokenMetrics,
)
from megatron_dppo.batch import SequenceSource
from megatron_dppo.checkpoint.hf_export import weight_exporter
from megatron_dppo.checkpoint.training_state import Trainee
from megatron_dppo.checkpoint.weight_buckets import WeightBuckets
from megatron_dppo.errors import listed
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import buffers
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.router_replay.replay import RouterReplayController
from megatron_dppo.vocab_parallel.stats import TokenStats

_SHORT_NAMES = {"abs_prob_diff_mean": "mean_abs_pi_mu", "entropy_mean": "entropy"}
"""Metrics that people watch, under the names the paper's figures give them."""


class NonFiniteTraining(RuntimeError):
    """More gradient steps in a row than allowed had a loss or gradient that is not finite."""


class MegatronActor:
    """One rank's share of the model, its optimizer, and the step that trains it.

    Built from chunks that `megatron_dppo.models` made and `megatron_dppo.checkpoint` filled. Every method is
    collective: all ranks call it with the same arguments (each pulls only its own rows from the source).
    """

    def __init__(
        self,
        runtime: Runtime,
        chunks: Sequence[torch.nn.Module],
        *,
        parallel: ParallelConfig,
        config: ActorConfig,
        optimizer: OptimizerConfig,
        preset: Preset,
        hf_config: HFConfig,
        temperature: float,
        normaliser: float,
        lora: LoraConfig | None = None,
        reference_kl: ReferenceKL | None = None,
    ) -> None:
        """
        hf_config    of the model the chunks are shards of
        temperature  of the rollout: the policy is `softmax(logits / temperature)`
        normaliser   L of the aggregation `seq-mean-token-sum-norm`, in tokens
        lora         of the adapters that are on the chunks (`attach_adapters`); None trains all weights
        reference_kl a KL to the model that the chunks hold now, or with adapters to that without them
        """
        self.runtime = runtime
        self.model = list(chunks)
        self._exporter = weight_exporter(self.model, hf_config, runtime.groups)
        self._config, self._preset = config, preset
        self._reference_kl = reference_kl
        self._reference = None if reference_kl is None else ReferencePolicy(self.model)
        self._vocab_size, self._normaliser = hf_config.vocab_size, normaliser
        self._skipped_in_a_row = 0
        moved = self.model if config.router_bias_update_rate else []
        self._biases = [bias for chunk in moved for _, bias in buffers(chunk)]
        """Correction biases that Megatron-Core moves with the gradients: before a step is known to be taken."""
        self.phases = Phases()
        """Names the parts of a step for profiles (`megatron_dppo.actor.profiling`)."""

        # Gradient buffers and optimizer.
        model_config = get_model_config(self.model[0])
        self._dtype = model_config.params_dtype
        options = config.megatron_options()
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=True,
            overlap_grad_reduce=optimizer.overlap_grad_reduce,
            overlap_param_gather=optimizer.overlap_param_gather,
            **options.data_parallel,
        )
        self.chunks = [
            DistributedDataParallel(config=model_config, ddp_config=ddp, module=chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(self.model)
        ]
        if optimizer.grad_reduce_dtype == "bfloat16":
            reduce_in_bfloat16(self.chunks)
        fuse_weight_gradients(self.model)
        release_dispatched(self.model)
        self.optimizer, self.scheduler = build_optimizer(optimizer, self.chunks, self._dtype, **options.optimizer)
        self._aux_losses = AuxiliaryLosses(config, model_config)
        kept = int(optimizer.keep_on_gpu_gib * 2**30)
        self.offloader = Offloader(self.chunks, self.optimizer, runtime.device, keep=kept)
        """For more than `offload` and `onload`."""
        self.trainee = Trainee(
            model=hf_config,
            models=self.chunks,
            groups=runtime.groups,
            parallel=parallel,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            lora=lora,
            require_present=self._require_state,
        )
        """What a training state holds of this actor."""

        # What Megatron-Core's schedule asks for.
        if optimizer.overlap_grad_reduce:
            waits = [chunk.no_sync for chunk in self.chunks]  # all microbatches but the last only accumulate
            model_config.no_sync_func = waits if len(waits) > 1 else waits[0]
        model_config.grad_scale_func = self.optimizer.scale_loss
        model_config.finalize_model_grads_func = _finalise_by_sum

        self._passes = Passes(
            runtime,
            self.model,
            self.chunks,
            parallel=parallel,
            config=config,
            vocab_size=hf_config.vocab_size,
            temperature=temperature,
            topk=preset.needs_topk or (reference_kl is not None and reference_kl.estimator is KLEstimator.TOPK),
        )
        self.moe_layer_groups = self._passes.moe_layer_groups
        """Numbers of the MoE layers of every model chunk of the job: how routes are best stored."""

    def update(
        self,
        source: SequenceSource,
        signal: TrainingSignal,
        *,
        look: Sequence[int] | None = None,
        listener: Callable[[UpdateProgress], None] | None = None,
    ) -> UpdateReport:
        """One gradient step per mini-batch and epoch. With `look` the report says which tokens the trust region
        blocked, and of these sequences at which rows. `mismatch/...` are of the first mini-batch, whose pass has the
        weights that the call began with. `listener` hears how far the update is: after an error, what of it is in the
        weights.

        Raises NonFiniteTraining after too many skipped steps in a row, RuntimeError where routes went missing: both on
        all ranks.
        """
        self._require(*PARTS)
        progress = ProgressTeller(signal.epochs * len(signal.mini_batches), listener)
        device = self.runtime.device
        advantages = torch.from_numpy(signal.advantages.astype(np.float32)).to(device)
        advantage_at = None if signal.spans is None else signal.spans.on(device)
        returns = torch.from_numpy(signal.returns.astype(np.float32)).to(device)
        trained = torch.tensor(signal.trained_of_episode(source.trained), device=device)
        pulled_before = source.pulled_bytes
        plans = [self._passes.plan(source, sequences) for sequences in signal.mini_batches]

        # Passes before the first step: the anchor is the policy that all mini-batches begin with.
        before = None
        if self._preset.needs_recomputed_logp:
            before = [self._passes.recompute(source, plan, progress) for plan in plans]
        reference = None
        if self._reference_kl is not None and self._reference_kl.place is KLPlace.LOSS:
            assert self._reference is not None
            topk = self._reference_kl.estimator is KLEstimator.TOPK

            def keep(_: Microbatch, stats: TokenStats) -> Recomputed:
                return Recomputed(stats.logp, stats.topk_logp if topk else None)

            with self.phases("reference"), progress.inside(), self._reference.in_place():
                reference = [self._passes.reference(source, plan, keep) for plan in plans]

        # Gradient steps.
        metrics = TokenMetrics.empty(device)
        totals = StepTotals()
        mismatch: dict[str, float] = {}
        blocked = None
        if look is not None:
            watch = torch.isin(torch.arange(len(trained)), torch.tensor(look, dtype=torch.int64)).to(device)
            blocked = BlockedTokens(watch, self._vocab_size, contributes=self._passes.contributes)
        for number in list(range(len(plans))) * signal.epochs:
            sequences, plan = signal.mini_batches[number], plans[number]
            objective = MiniBatchObjective(
                preset=self._preset,
                denominators=Denominators(
                    tokens=int(source.trained[sequences].sum()),
                    sequences=signal.episodes_of(sequences),
                    constant=self._normaliser,
                ),
                advantages=advantages,
                advantage_at=advantage_at,
                returns=returns,
                trained=trained,
                recomputed=None if before is None else before[number].statistics,
                reference=None if reference is None else reference[number],
                reference_kl=self._reference_kl,
                context_group=self.runtime.groups.cp if self.runtime.groups.cp.size() > 1 else None,
                watch=None if blocked is None else blocked.watch,
                vocab_size=self._vocab_size,
            )
            own_routes = None if before is None else before[number].routes
            with self.phases("microbatches"):
                for chunk in self.chunks:  # the device does so while the host makes the first microbatch
                    chunk.zero_grad_buffer()
                microbatches = self._passes.build(source, plan, replay=self._passes.replay, own_routes=own_routes)
            totals.add_plan(plan)
            self._aux_losses.start(plan.padded_rows)
            controller = RouterReplayController(self._passes.routers) if self._passes.replay != "none" else None
            biases = [bias.clone() for bias in self._biases]
            with self.phases("forward and backward"), progress.inside():
                reports = self._passes.run(microbatches, objective, replay=controller, forward_only=False)
                prepare_step(self.optimizer)
            with self.phases("metrics"):
                self._aux_losses.finish(len(microbatches))
                if controller is not None:
                    recorded = source.lengths if self._passes.replay == "r2" else source.routed
                    totals.add_replay(self._passes.account(controller, plan, source, recorded))
                loss, part = reduce_losses(reports, contributes=self._passes.contributes, device=device)
                metrics = metrics.merge(part)
                mismatch = mismatch or part.mismatch()  # before the first step of this call, from that step's own pass
                if blocked is not None:
                    blocked.add(reports)
            with self.phases("optimizer"):
                finite = bool(np.isfinite(loss))
                self.offloader.arrive()
                with progress.inside():
                    outcome = guarded_step(self.optimizer, self.scheduler, loss_is_finite=finite)
                self.optimizer.zero_grad()  # parameter by parameter, while the device steps
                if not outcome.applied:
                    for bias, before_step in zip(self._biases, biases, strict=True):
                        bias.copy_(before_step)
            progress.step(applied=outcome.applied)
            self._watch_finite(outcome.applied or outcome.overflowed, reports)
            totals.add_step(loss, outcome)

        # What all of them came to.
        self.complete_weights()
        finals = metrics.finalize(signal.epochs * sum(map(signal.episodes_of, signal.mini_batches)))
        policy = {f"policy/{_SHORT_NAMES.get(name, name)}": value for name, value in finals.items()}
        policy |= {f"mismatch/{name}": value for name, value in mismatch.items()}
        pulled = reduce_bytes(source.pulled_bytes - pulled_before, device)
        found = () if blocked is None else blocked.reduce()
        return UpdateReport(policy | self._aux_losses.metrics() | totals.metrics() | pulled, *found)

    def reference_kl(self, source: SequenceSource) -> np.ndarray:
        """The estimate of KL(mu || reference), summed over the trained tokens of each sequence, float64 `[B]`, the same
        on all ranks. Collective: a forward pass and one all-reduce of B numbers."""
        self._require("weights")
        assert self._reference_kl is not None
        assert self._reference is not None
        estimator = self._reference_kl.estimator
        plan = self._passes.plan(source, np.arange(len(source.lengths)))
        sums = torch.zeros(len(source.lengths), dtype=torch.float64, device=self.runtime.device)

        def add(microbatch: Microbatch, stats: TokenStats) -> None:
            rows = microbatch.rows
            if not self._passes.contributes:
                return
            assert rows is not None
            mu = Recomputed(rows.mu_logp, rows.topk_mu_logp)
            kl = kl_of_rows(estimator, rows, mu, Recomputed(stats.logp, stats.topk_logp))
            sums.index_add_(0, rows.sequence.clamp(min=0), torch.where(rows.loss_mask, kl, 0.0))

        with self._reference.in_place():
            self._passes.reference(source, plan, add)
        dist.all_reduce(sums)
        return sums.cpu().numpy()

    def complete_weights(self) -> None:
        """Bring every rank the weights of the last gradient step, where the next forward would have waited for them."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def parity(self, source: SequenceSource, *, replay: bool, keep: int = 0) -> ParityReport:
        """How far this model's log-probabilities are from the engine's, over all trained rows (forward passes only).

        Metrics are `max_abs_logp_gap` in nats, `mean_abs_prob_gap` and, for MoE models with recorded routes,
        `differing_routings`, the (row, layer) pairs whose live top-k differs from the engine's, and
        `differing_tokens`, the rows where any layer's does. With `replay=False`
        the live routers decide, and the record is only compared with. The report has up to `keep` tokens of each rank
        that has log-probabilities.
        """
        self._require("weights")
        watch = self._passes.moe_layers > 0 and bool(source.routed.sum())
        controller = RouterReplayController(self._passes.routers, force=replay) if watch else None
        plan = self._passes.plan(source, np.arange(len(source.lengths)))
        microbatches = self._passes.build(source, plan, replay="r3" if watch else "none")
        passed = self._passes.run(microbatches, collect, replay=controller)
        kept: list[Tensor] = []
        gap = torch.zeros(1, dtype=torch.float64, device=self.runtime.device)
        sums = torch.zeros(2, dtype=torch.float64, device=self.runtime.device)
        if self._passes.contributes:
            for microbatch, stats in passed:
                rows = microbatch.rows
                assert rows is not None
                pi, mu = stats.logp[rows.loss_mask].detach().double(), rows.mu_logp[rows.loss_mask].double()
                if len(pi):
                    gap = torch.maximum(gap, (pi - mu).abs().max())
                which = [rows.targets, rows.sequence, rows.position]
                kept.append(torch.stack([mu, pi, *(one[rows.loss_mask].double() for one in which)], dim=1))
                sums += torch.stack([(pi.exp() - mu.exp()).abs().sum(), rows.loss_mask.sum().double()])
        dist.all_reduce(gap, op=dist.ReduceOp.MAX)
        dist.all_reduce(sums)
        tokens = gather_rows(kept, keep, 5) if keep else np.zeros((0, 5), dtype=np.float32)
        result = {"max_abs_logp_gap": float(gap), "mean_abs_prob_gap": float(sums[0] / sums[1].clamp(min=1))}
        if controller is not None:
            account = self._passes.account(controller, plan, source, source.routed)
            result |= {
                "differing_tokens": float(account.differing_tokens),
                "differing_routings": float(account.differing.sum()),
                "compared_routings": float(account.replayed.sum()),
            }
        return ParityReport(result, tokens)

    def export_weights(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every weight by its Hugging Face name, streamed: whole on rank 0, None elsewhere (see `weight_exporter`)."""
        self._require("weights")
        return self._exporter.stream()

    def weight_buckets(self, bucket_bytes: int, shares: int = 1, *, sliced: bool = False) -> WeightBuckets:
        """The weights as they go to engines whose experts `shares` workers divide (`sliced`: each of them)."""
        self._require("weights")
        return self._exporter.buckets(bucket_bytes, shares, sliced=sliced)

    def offload(self, parts: Iterable[Part] = PARTS) -> int:
        """Move these to host memory, so that the engine can have the GPU (see `Offloader`); the bytes freed here."""
        return self.offloader.offload(parts)

    def onload(self, parts: Iterable[Part] = PARTS) -> None:
        """Bring them back, bit for bit, in the order in which a step needs them: optimizer state comes while gradients
        are computed. Training needs all parts, `parity` and `export_weights` the weights."""
        self.offloader.onload(parts)

    def _require(self, *parts: Part) -> None:
        missing = [part for part in parts if part in self.offloader.away]
        if missing:
            raise RuntimeError(f"{', '.join(missing)} are offloaded to the host; call onload() first")

    def _require_state(self) -> None:
        self._require("weights", "optimizer")
        self.offloader.arrive()

    def _watch_finite(self, finite: bool, reports: list[MicrobatchReport]) -> None:
        """Say which tokens were not finite; stop after too many skipped steps in a row."""
        if finite:
            self._skipped_in_a_row = 0
            return
        self._skipped_in_a_row += 1
        named = [
            f"sequence {int(sequence)} row {int(position)}"
            for report in reports
            for sequence, position in zip(*(t[report.nonfinite[0]].tolist() for t in report.nonfinite[1:]), strict=True)
        ]
        where = f"tokens with a non-finite loss on this rank: {listed(named, 8)}" if named else ""
        if named:
            print(f"rank {self.runtime.rank}: gradient step skipped; {where}", flush=True)
        if self._skipped_in_a_row > self._config.max_skipped_steps:
            raise NonFiniteTraining(
                f"{self._skipped_in_a_row} gradient steps in a row were not finite "
                f"(actor.max_skipped_steps={self._config.max_skipped_steps}); "
                f"{where or 'the tokens are named by the ranks that hold them'}"
            )


def _finalise_by_sum(model: list[Any], num_tokens: Tensor | None = None, **options: Any) -> None:
    """Megatron-Core's gradient reductions without its division by a token count: losses are divided beforehand."""
    finalize_model_grads(model, None, **options)
