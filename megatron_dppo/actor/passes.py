"""Passes over a rollout: which microbatches a rank has, and the model's run over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from megatron_dppo.actor.config import ActorConfig, ReplayMode
from megatron_dppo.actor.forward import run_schedule
from megatron_dppo.actor.microbatch import Microbatch, MicrobatchBuilder, MicrobatchStream
from megatron_dppo.actor.objective import Recomputed, collect
from megatron_dppo.actor.pack_shape import Split
from megatron_dppo.actor.packing import PackPlan, plan_packs
from megatron_dppo.actor.results import ProgressTeller
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.batch import SequenceSource
from megatron_dppo.models.parallel import ParallelConfig
from megatron_dppo.router_replay.accounting import ReplayAccount, settle
from megatron_dppo.router_replay.layout import LocalRoutes
from megatron_dppo.router_replay.replay import RouterReplayController, find_routers, moe_layer_numbers
from megatron_dppo.router_replay.requirements import check_trainer
from megatron_dppo.router_replay.routes import Routes
from megatron_dppo.vocab_parallel.stats import TokenStats


@dataclasses.dataclass(frozen=True)
class BeforeUpdate:
    """What the pass before the update leaves, per microbatch of a mini-batch."""

    statistics: list[Recomputed]
    """This model's own; [] but on the last pipeline stage."""
    routes: list[LocalRoutes] | None
    """The experts this rank's routers chose, to be replayed in the update (R2); None otherwise."""


class Passes:
    """What forward and backward passes of one rank need beside the weights. Every method but `plan` and `build` is
    collective."""

    def __init__(
        self,
        runtime: Runtime,
        model: Sequence[torch.nn.Module],
        chunks: Sequence[Any],
        *,
        parallel: ParallelConfig,
        config: ActorConfig,
        vocab_size: int,
        temperature: float,
        topk: bool,
    ) -> None:
        """
        model        the rank's chunks
        chunks       the same, each in Megatron-Core's data-parallel wrapper
        vocab_size   without padding
        temperature  of the rollout
        topk         whether anything needs the engine's top-K
        """
        self._runtime, self._chunks, self._config = runtime, chunks, config
        self._vocab_size, self._temperature = vocab_size, temperature
        groups = runtime.groups
        model_config = get_model_config(model[0])
        layer_numbers = moe_layer_numbers(model_config)
        self.moe_layers = len(layer_numbers)
        """Of the whole model."""
        if self.replay != "none":
            check_trainer(model_config)
        found = find_routers(model, layer_numbers)
        self.moe_layer_groups = gather_layer_groups(model, layer_numbers)
        """Numbers of the MoE layers of every model chunk of the job."""
        self.routers = [(local, router) for local, (_, router) in enumerate(found)]
        """(index into the routes of a microbatch, router) of this rank's MoE layers."""
        self._layers = [index for index, _ in found]
        last_stage = groups.pp.rank() == groups.pp.size() - 1
        self._split = Split(context=groups.cp.size(), sequence=groups.tp.size() if parallel.sequence_parallel else 1)
        self._builder = MicrobatchBuilder(
            device=runtime.device,
            split=self._split,
            context_rank=groups.cp.rank(),
            sequence_rank=groups.tp.rank() if parallel.sequence_parallel else 0,
            moe_layers=tuple(self._layers),
            last_stage=last_stage,
            topk=topk,
        )
        self._microbatch_multiple = parallel.pipeline if parallel.chunks > 1 else 1
        self.contributes = last_stage and groups.tp.rank() == 0
        """Whether this rank's statistics count in sums over all ranks."""

    @property
    def replay(self) -> ReplayMode:
        """Whose routes an update replays."""
        return self._config.router_replay if self.moe_layers else "none"

    def plan(self, source: SequenceSource, sequences: np.ndarray) -> PackPlan:
        """The microbatches of all ranks, as numbers of the source's sequences."""
        plan = plan_packs(
            source.lengths[sequences],
            budget=self._config.max_tokens_per_microbatch,
            data_parallel=self._runtime.groups.dp.size(),
            split=self._split,
            microbatch_multiple=self._microbatch_multiple,
            long_sequences=self._config.long_sequences,
            equal_rows=self._config.token_dispatcher == "allgather",
        )
        return plan.of(sequences)

    def build(
        self, source: SequenceSource, plan: PackPlan, *, replay: ReplayMode, own_routes: list[LocalRoutes] | None = None
    ) -> MicrobatchStream:
        """This rank's microbatches: with the engine's routes (r3), a record of nothing but gaps (r2), or without;
        or with `own_routes`. Pulls the rows and columns they need, and nothing else."""
        if own_routes is not None:
            replay = "none"
        columns, rank = self._builder.columns(routes=replay == "r3"), self._runtime.groups.dp.rank()

        def make(number: int) -> Microbatch:
            pack = plan.packs[rank][number]
            batch = source.rows(np.asarray(pack, dtype=np.int64), columns)
            if replay == "r2" and self.routers:
                router = self.routers[0][1]
                gaps = Routes.gaps(len(batch.input_ids), len(self._layers), router.topk, router.config.num_moe_experts)
                batch = dataclasses.replace(batch, routes=gaps)
            made = self._builder.build(batch, pack, pack_rows=plan.rows[rank][number], replay=replay != "none")
            return made if own_routes is None else dataclasses.replace(made, routes=own_routes[number])

        return MicrobatchStream(make, plan.rows[rank])

    def run(
        self,
        microbatches: MicrobatchStream,
        loss: Any,
        *,
        replay: RouterReplayController | None,
        forward_only: bool = True,
    ) -> list[Any]:
        """`run_schedule` with the routers under `replay`."""
        # Without a backward the schedule would build a graph all the same, and what is kept would keep all activations.
        with torch.set_grad_enabled(not forward_only), replay.installed() if replay else nullcontext():
            return run_schedule(
                self._chunks,
                microbatches,
                loss,
                vocab_size=self._vocab_size,
                device=self._runtime.device,
                tensor_group=self._runtime.groups.tp,
                temperature=self._temperature,
                replay=replay,
                forward_only=forward_only,
            )

    def recompute(self, source: SequenceSource, plan: PackPlan, progress: ProgressTeller) -> BeforeUpdate:
        """This model's own statistics of the rows, before any step, and under R2 the experts it chose."""
        microbatches = self.build(source, plan, replay=self.replay)
        own = self.replay == "r2"
        controller = RouterReplayController(self.routers, keep_routes=own) if self.replay != "none" else None
        with progress.inside():
            passed = self.run(microbatches, collect, replay=controller)
        routes = None
        if controller is not None:
            self.account(controller, plan, source, np.zeros_like(source.lengths) if own else source.routed)
            routes = [controller.used_routes(i) for i in range(len(microbatches))] if own and self.routers else None
        return BeforeUpdate([Recomputed(stats.logp, stats.topk_logp) for _, stats in passed], routes)

    def reference[T](
        self, source: SequenceSource, plan: PackPlan, keep: Callable[[Microbatch, TokenStats], T]
    ) -> list[T]:
        """What `keep` makes of this rank's microbatches with the weights that are in place now, the reference's; [] but
        on the last pipeline stage. Under R3 the engine's routes are replayed, as in the pass that they are compared
        with: the KL is of the weights, not of a choice of experts."""
        replay: ReplayMode = "r3" if self.replay == "r3" else "none"
        controller = RouterReplayController(self.routers) if replay != "none" else None
        microbatches = self.build(source, plan, replay=replay)

        def loss(_: int, microbatch: Microbatch, stats: TokenStats) -> tuple[torch.Tensor, T]:
            return stats.logp.sum() * 0.0, keep(microbatch, stats)

        kept = self.run(microbatches, loss, replay=controller)
        if controller is not None:
            self.account(controller, plan, source, source.routed)
        return kept

    def account(
        self,
        controller: RouterReplayController,
        plan: PackPlan,
        source: SequenceSource,
        recorded: np.ndarray,
    ) -> ReplayAccount:
        """Every recorded route must have been replayed once in every MoE layer; `recorded` are rows per sequence."""
        return settle(
            controller.counts(len(plan.packs[0])),
            layers=self._layers,
            moe_layers=self.moe_layers,
            recorded=np.array([[recorded[pack].sum() for pack in packs] for packs in plan.packs], dtype=np.int64),
            rows=np.array([[source.lengths[pack].sum() for pack in packs] for packs in plan.packs], dtype=np.int64),
            data_rank=self._runtime.groups.dp.rank(),
            device=self._runtime.device,
        )


def gather_layer_groups(
    chunks: Sequence[torch.nn.Module], moe_layer_numbers: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Numbers (among the MoE layers of the model) held by each model chunk of any rank, in model order.

    moe_layer_numbers: 1-based layer numbers of all MoE layers. Collective: one all-gather of a few numbers. Together
    the groups hold every MoE layer once; chunks without one give no group.
    """
    own = [tuple(index for index, _ in find_routers([chunk], moe_layer_numbers)) for chunk in chunks]
    everybody: list[list[tuple[int, ...]]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everybody, own)
    return tuple(sorted({group for rank in everybody for group in rank if group}))
