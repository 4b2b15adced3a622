"""One rank of one case. Rank 0 writes what was measured, as soon as it is."""

from __future__ import annotations

import gc
import json
import statistics
import time
import traceback
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.utils import get_model_config

from actor_step.arms import Arm, cross_entropy_arm, policy_arm
from actor_step.cases import LEARNING_RATE, REPEATS, SEQUENCES_PER_PACK, SMALL, TOPK, Case
from actor_step.experts import ExpertLayer, difference
from actor_step.problem import advantages, agreement_batch, build, describe, timing_batch
from actor_step.stock import stock_kernels, stock_optimizer
from megatron_dppo.actor import runtime as actor_runtime
from megatron_dppo.actor.actor import MegatronActor, TrainingSignal
from megatron_dppo.actor.config import ActorConfig, OptimizerConfig
from megatron_dppo.actor.layers import fuse_weight_gradients
from megatron_dppo.actor.profiling import StepProfile, profiled
from megatron_dppo.algorithm import presets
from megatron_dppo.batch import InMemorySource, RolloutBatch
from megatron_dppo.models.flops import training_flops
from megatron_dppo.models.parallel import ParallelConfig

MAIN, REPLAY, NO_REPLAY = "dppo-topk-tv, replay", "dppo-binary-tv, replay", "dppo-binary-tv"
STOCK = "dppo-binary-tv, replay, Megatron-Core's optimizer step"
STOCK_KERNELS = "dppo-topk-tv, replay, stock experts, dispatcher and Adam"
PLAIN = "dppo-topk-tv, replay, one microbatch after the other"
OLD_LOGP = "dppo-topk-tv-decoupled, replay"
EXPERTS, STOCK_EXPERTS = "experts", "stock experts and dispatcher"


class Bench:
    """The actor of a case, and what was found so far."""

    def __init__(self, case: Case, file: Path, *, tiny: bool, seconds: float, fusion: bool) -> None:
        started = time.perf_counter()
        self.case, self.file, self.tiny, self.seconds = case, file, tiny, seconds
        self.sizes = SMALL if tiny else case.sizes
        self.parallel = ParallelConfig(**case.layout)
        self.runtime = actor_runtime.start(self.parallel, seed=0, timeout_minutes=3)
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.model = describe(case, tiny=tiny)
        self.found: dict[str, Any] = {"case": case.name, "gpus": case.gpus, "layers": self.model.layers}
        if torch.cuda.is_available():
            self.found["device"] = torch.cuda.get_device_name()
        chunks = build(case, self.model, self.runtime, self.dtype)
        self.found["parameters_per_rank"] = [
            int(n) for n in self._gather(float(sum(p.numel() for chunk in chunks for p in chunk.parameters())))
        ]
        budget = self.sizes.pack if case.measure != "agreement" else self.sizes.agreement_budget // case.budget_divisor
        self.actor = MegatronActor(
            self.runtime,
            chunks,
            parallel=self.parallel,
            config=ActorConfig(
                dtype=str(self.dtype).removeprefix("torch."),
                max_tokens_per_microbatch=budget,
                recompute=case.recompute,
                recompute_layers=case.recompute_layers,
            ),
            optimizer=OptimizerConfig(
                lr=LEARNING_RATE if case.measure != "agreement" else 1e-5,
                overlap_grad_reduce=case.overlap,
                overlap_param_gather=case.overlap,
            ),
            preset=presets.get("dppo-topk-tv", topk=TOPK),
            hf_config=self.model,
            temperature=1.0,
            normaliser=float(self.sizes.length),
        )
        gc.collect()
        gc.freeze()  # as `train` does
        if not fusion:
            fuse_weight_gradients(self.actor.model, on=False)
        self.fusion = fusion
        self.note("setup_s", time.perf_counter() - started)

    def note(self, key: str, value: Any) -> None:
        """Keep a finding; what a crash leaves behind is all that was noted."""
        self.found[key] = value
        if self.runtime.rank == 0:
            self.file.write_text(json.dumps(self.found, indent=1))
            print(f"{self.case.name}: {key} {value if not isinstance(value, dict) else ''}", flush=True)

    def agreement(self) -> None:
        """Three steps on the batch that all layouts share."""
        batch = agreement_batch(self.model, self.sizes)
        source = InMemorySource.of(batch)
        weights = advantages(len(batch))
        signal = TrainingSignal(weights, weights, [np.arange(len(batch))])
        self.note("parity", self.actor.parity(source, replay=True).metrics)
        steps = []
        for _ in range(3):
            metrics = self.actor.update(source, signal).metrics
            steps.append({"loss": metrics["optimizer/loss"], "grad_norm": metrics["optimizer/grad_norm"]})
        self.note("steps", steps)
        self.note("peak_gib", self._peak())

    def _batch(self) -> tuple[InMemorySource, TrainingSignal, RolloutBatch]:
        batch = timing_batch(self.case, self.model, self.sizes)
        source = InMemorySource.of(batch)
        weights = advantages(len(batch))
        signal = TrainingSignal(weights, weights, [np.arange(len(batch))])
        self.note("tokens", len(batch.token_ids))
        flops = training_flops(self.model, batch.lengths)
        self.note("flops_per_gpu", flops / self.case.gpus)
        return source, signal, batch

    def depth(self) -> None:
        """The same step with our kernels and with stock ones; where the exchange between experts' ranks is overlapped,
        with and without that."""
        source, signal, batch = self._batch()
        whole = training_flops(describe(replace(self.case, layers=self.case.whole), tiny=self.tiny), batch.lengths)
        self.note("whole_flops_per_gpu", whole / self.case.gpus)
        ours = policy_arm(self.actor, source, signal, "dppo-topk-tv", replay=True)

        def stock() -> None:
            with stock_kernels(self.actor):
                ours()

        def plain() -> None:
            config = get_model_config(self.actor.model[0])
            config.overlap_moe_expert_parallel_comm = False
            ours()
            config.overlap_moe_expert_parallel_comm = True

        arms = {MAIN: ours} | ({PLAIN: plain} if self.parallel.overlap_expert_exchange else {STOCK_KERNELS: stock})
        for name, arm in arms.items():
            self._step(arm)
            self._reset_peak()
            self._step(arm)
            self.note(f"peak_gib, {name}", self._peak())
        self.note("with_replay", self._rounds(arms))
        self.note("peak_gib", self.found[f"peak_gib, {MAIN}"])
        self.note("profile", self._profile(ours))

    def experts(self) -> None:
        """A layer of experts with our kernels and with stock ones."""
        layer = ExpertLayer(self.actor, self.sizes.pack, self.dtype)

        def stock() -> torch.Tensor:
            with stock_kernels(self.actor):
                return layer.run()

        self.note("rows", int(layer.map.sum()))
        self.note("difference", difference(layer.results(layer.run), layer.results(stock)))
        runs: dict[str, Any] = {EXPERTS: layer.run, STOCK_EXPERTS: stock}
        arms: dict[str, Arm] = {name: partial(_repeat, run) for name, run in runs.items()}
        taken = self._rounds(arms)
        self.note("layer_s", {name: [seconds / REPEATS for seconds in times] for name, times in taken.items()})
        self.note("profile", self._profile(arms[EXPERTS]))
        self.note("stock_profile", self._profile(arms[STOCK_EXPERTS]))

    def time(self) -> None:
        source, signal, batch = self._batch()

        def policy(preset: str, *, replay: bool) -> Arm:
            return policy_arm(self.actor, source, signal, preset, replay=replay)

        arms = {
            MAIN: policy("dppo-topk-tv", replay=True),
            REPLAY: policy("dppo-binary-tv", replay=True),
            NO_REPLAY: policy("dppo-binary-tv", replay=False),
        }
        self._reset_peak()
        self.note("with_replay", self._rounds({MAIN: arms[MAIN]} if self.case.predicted else arms))
        self.note("peak_gib", self._peak())
        if self.case.predicted:
            return
        self.note("profile", self._profile(arms[MAIN]))
        self.note("profile_unwaited", self._profile(arms[MAIN], waited=False))
        if self.case.recompute_logp:
            # The decoupled preset anchors its trust region at the policy before the update, which a pass recomputes.
            old = {MAIN: arms[MAIN], OLD_LOGP: policy("dppo-topk-tv-decoupled", replay=True)}
            self.note("old_logp", self._rounds(old))
        if self.case.replay_rounds:
            pair = {REPLAY: arms[REPLAY], NO_REPLAY: arms[NO_REPLAY]}
            self.note("replay", self._rounds(pair, exactly=3 if self.tiny else self.case.replay_rounds))

        if self.case.optimizer_arm:
            with stock_optimizer(self.actor.optimizer):
                self.note("stock_optimizer_profile", self._profile(arms[MAIN]))
            self.note("stock_optimizer", self._rounds({REPLAY: arms[REPLAY], STOCK: self._stock(arms[REPLAY])}))

        if self.case.wgrad_arm and self.fusion:
            fuse_weight_gradients(self.actor.model, on=False)
            self.note("without_wgrad_fusion", self._rounds({REPLAY: arms[REPLAY]}))
            fuse_weight_gradients(self.actor.model)

        if self.case.cross_entropy:
            mine = np.arange(len(batch)).reshape(-1, SEQUENCES_PER_PACK)
            mine = list(mine[self.runtime.groups.dp.rank() :: self.runtime.groups.dp.size()])
            objective = {
                NO_REPLAY: arms[NO_REPLAY],
                "dppo-topk-tv": policy("dppo-topk-tv", replay=False),
                "dppo-topk-kl": policy("dppo-topk-kl", replay=False),
                "cross-entropy": cross_entropy_arm(self.actor, source, mine, fused=False),
            }
            self._reset_peak()
            self.note("objective", self._rounds(objective))
            self.note("cross_entropy_peak_gib", self._peak())
            if torch.cuda.is_available():
                fused = {
                    NO_REPLAY: arms[NO_REPLAY],
                    "cross-entropy": cross_entropy_arm(self.actor, source, mine, fused=True),
                }
                self.note("objective_fused", self._rounds(fused))

        if self.case.offload:
            self.note("offload", self._offload(arms[MAIN]))

    def _stock(self, arm: Arm) -> Arm:
        def run() -> None:
            with stock_optimizer(self.actor.optimizer):
                arm()

        return run

    def _offload(self, arm: Arm) -> dict[str, Any]:
        """What offloading frees and how long it takes, the second time (host buffers exist then)."""
        found: dict[str, Any] = {}
        for _ in range(2):
            found = {"allocated_gib": self._allocated()}
            before = self._checksum()
            start = time.perf_counter()
            found["freed_gib"] = self.actor.offload() / 2**30
            found["offload_s"] = time.perf_counter() - start
            found["left_gib"] = self._allocated()
            start = time.perf_counter()
            self.actor.onload()
            self.actor.offloader.arrive()
            torch.cuda.synchronize()
            found["onload_s"] = time.perf_counter() - start
            found["same_bits"] = self._checksum() == before
        found["step_after_s"] = self._step(arm)
        return found

    def _checksum(self) -> list[int]:
        """Sums of the bits of weights, master weights and moments."""
        parts = self.actor.optimizer.chained_optimizers
        states = [state for part in parts for state in part.optimizer.state.values()]
        tensors = [p.data for chunk in self.actor.model for p in chunk.parameters()]
        tensors += [p.data for part in parts for group in part.optimizer.param_groups for p in group["params"]]
        tensors += [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]
        return [int(t.reshape(-1).view(torch.int16).sum(dtype=torch.int64)) for t in tensors]

    def _allocated(self) -> float:
        return torch.cuda.memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0

    def _rounds(self, arms: dict[str, Arm], exactly: int | None = None) -> dict[str, list[float]]:
        """Seconds of each step: an untimed one of each, then rounds in turn: `exactly` so many, else until the time is
        spent, at least three."""
        for arm in arms.values():
            self._step(arm)
        taken: dict[str, list[float]] = {name: [] for name in arms}
        end = time.perf_counter() + self.seconds
        while True:
            names = list(arms) if len(taken[next(iter(arms))]) % 2 == 0 else list(reversed(arms))
            for name in names:
                taken[name].append(self._step(arms[name]))
            rounds = len(taken[names[0]])
            enough = rounds >= 3 and (time.perf_counter() > end or rounds >= self.case.most_rounds)
            if self.runtime.broadcast(rounds == exactly if exactly else enough):
                return taken

    def _step(self, arm: Arm) -> float:
        """Seconds of the slowest rank."""
        self._meet()
        start = time.perf_counter()
        arm()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return max(self._gather(time.perf_counter() - start))

    def _profile(self, arm: Arm, *, waited: bool = True) -> dict[str, Any]:
        """waited: for the device around every phase, without which phases have no times, but the step its own pace."""
        self._meet()
        traced = self.case.trace and self.runtime.rank == 0 and not waited
        trace = self.file.with_suffix(".trace.json.gz") if traced else None
        with profiled(self.actor.phases if waited else None, trace=trace) as profile:
            arm()
        return self._mean(profile)

    def _mean(self, profile: StepProfile) -> dict[str, Any]:
        """Mean over ranks (pipeline stages differ: the last one has the LM head)."""
        every: list[StepProfile | None] = [None] * self.runtime.world_size
        dist.all_gather_object(every, profile)
        ranks = [p for p in every if p is not None]
        work = {name for p in ranks for name in p.work}
        return {
            "seconds": statistics.mean(p.seconds for p in ranks),
            "busy": statistics.mean(p.busy for p in ranks),
            "work": {name: statistics.mean(p.work.get(name, 0.0) for p in ranks) for name in sorted(work)},
            "phases": {name: statistics.mean(p.phases[name].seconds for p in ranks) for name in ranks[0].phases},
            "phase_peak_gib": {name: max(p.phases[name].peak_bytes for p in ranks) / 2**30 for name in ranks[0].phases},
        }

    def _meet(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._gather(0.0)

    def _gather(self, value: float) -> list[float]:
        mine = torch.tensor([value], dtype=torch.float64, device=self.runtime.device)
        every = [torch.empty_like(mine) for _ in range(self.runtime.world_size)]
        dist.all_gather(every, mine)
        return [float(v) for v in every]

    def _reset_peak(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def _peak(self) -> float:
        return max(self._gather(torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0))


def _repeat(run: Any) -> None:
    for _ in range(REPEATS):
        run()


def work(case: Case, file: Path, *, tiny: bool, seconds: float, fusion: bool) -> int:
    """Run a case on this rank; the exit code."""
    try:
        bench = Bench(case, file, tiny=tiny, seconds=seconds, fusion=fusion)
        {"time": bench.time, "depth": bench.depth, "agreement": bench.agreement, "experts": bench.experts}[
            case.measure
        ]()
        bench.note("finished", True)
    except BaseException:
        traceback.print_exc()
        return 1
    actor_runtime.stop()
    return 0
