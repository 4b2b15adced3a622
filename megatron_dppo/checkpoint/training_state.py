"""Everything a run needs to go on: weights, optimizer, schedule, generators, progress; for any layout to load."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import queue
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dppo.checkpoint import state_folder
from megatron_dppo.checkpoint.atomic import INCOMPLETE, require_room
from megatron_dppo.checkpoint.carried import keep_carried
from megatron_dppo.checkpoint.checksums import ChecksummedFile
from megatron_dppo.checkpoint.first_rank import on_first_rank
from megatron_dppo.checkpoint.hf_side_files import check_side_files, copy_side_files
from megatron_dppo.checkpoint.safe_dcp import nothing_executed
from megatron_dppo.checkpoint.state_parts import (
    collect_rng,
    grad_scaler_state,
    load_adapters,
    load_optimizer_state,
    optimizer_step,
    restore_rng,
    sharded_adapters,
    sharded_optimizer_state,
)
from megatron_dppo.errors import UserError, file_errors, of_file
from megatron_dppo.models.hf_config import HFConfig
from megatron_dppo.models.live import unwrap
from megatron_dppo.models.lora.config import LoraConfig
from megatron_dppo.models.lora.sites import adapter_tensors
from megatron_dppo.models.parallel import ParallelConfig

logger = logging.getLogger(__name__)


class Scheduler(Protocol):
    """Megatron-Core's OptimizerParamScheduler, or anything whose state is numbers and strings."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Trainee:
    """What is saved and loaded: the live objects of one rank. Without an optimizer only weights are; with adapters
    only those and their optimizer state, and the base weights are the caller's to load."""

    model: HFConfig
    models: Sequence[torch.nn.Module]
    groups: ProcessGroupCollection
    parallel: ParallelConfig
    optimizer: MegatronOptimizer | None = None
    scheduler: Scheduler | None = None
    lora: LoraConfig | None = None
    require_present: Callable[[], None] = lambda: None
    """Raises where tensors are not in their places now (offloaded to the host)."""


@dataclass(frozen=True)
class Resumed:
    """What a loaded state says beside the tensors."""

    folder: Path
    step: int
    progress: dict[str, Any]


class TrainingStates:
    """Saves training states under `root` and loads them. Every method is a collective over all ranks.

    keep  how many complete states stay; older ones go once a newer one is complete
    """

    def __init__(self, root: Path | str, trainee: Trainee, *, keep: int = 2) -> None:
        if keep < 1:
            raise UserError(f"checkpoint: keep must be at least 1, got {keep}")
        self.root, self.trainee, self.keep = Path(root), trainee, keep
        # Where the writer reports what it wrote. The stock queue lives in a fresh Python process of every rank, which
        # imports torch for the first report: seconds and half a gigabyte each.
        self._reports: queue.Queue[Any] = queue.Queue()
        self._digests: queue.Queue[tuple[str, str | OSError]] = queue.Queue()

    def save(self, step: int, progress: dict[str, Any]) -> None:
        """Write the state after optimizer step `step`. `progress` is JSON: data position, weight version, config, ...

        Master weights and moments of a data-parallel group are gathered bucket by bucket into host memory of all its
        ranks, which write a part each. A failing
        rank (a full disk) fails every rank with the same error, and the states before it stay as they were: a
        `UserError`, a `SystemFault` as of `errors.of_file`, or a RuntimeError for what is no fault of files.
        """
        self.trainee.require_present()
        check_side_files(self.trainee.model.path)
        trainee, described = self.trainee, self._describe(step, progress)
        partial = on_first_rank(lambda: self._partial_folder(step))
        state = self._model_state()
        if trainee.optimizer is not None:
            state["optimizer"] = sharded_optimizer_state(trainee.optimizer, state, trainee.groups, is_loading=False)
        state["rng"] = self._rng_slot(collect_rng())
        _drain(self._digests)  # of a save that failed
        filesystem_async._results_queue = self._reports
        # The files with the tensors are digested as they are written: reading terabytes again would double a save.
        filesystem_async.open = lambda path, _: ChecksummedFile(path, self._digests.put)
        # Every data-parallel rank has what was gathered, and writes its part of it.
        strategy = FullyParallelSaveStrategyWrapper(TorchDistSaveShardedStrategy(), trainee.groups.dp_cp)
        try:
            dist_checkpointing.save(state, str(partial), strategy, async_strategy="mcore")
        except CheckpointException as error:
            raise self._cannot_save(error) from None
        digests = self._written()
        on_first_rank(lambda: self._publish(partial, step, described, digests))

    def load(self, folder: Path | str | None = None, *, checked: bool = False) -> Resumed:
        """Load the state in `folder` (default: the latest under `root`, and where that is damaged the newest older one
        that is whole, with a warning and `state_folder.go_back`) into the trainee, whatever layout saved it.

        Refused with a `UserError`: an empty or incomplete folder, a file whose checksum is not that of the save (unless
        the caller has `checked` that by `require_whole`), another model, another parameter dtype, tensors that one side
        lacks. Nothing in the folder is executed. `SystemFault` as in `state_folder.newest_whole`, and `errors.of_file`
        for what is read after it.
        """
        self.trainee.require_present()
        # A shared file system may show nodes different states of its folders.
        source = Path(folder) if folder is not None else on_first_rank(self._latest)
        if folder is None:
            source, damaged = state_folder.newest_whole(source)
            if damaged:
                on_first_rank(lambda: self._go_back(source, damaged))
        elif not checked:
            state_folder.require_whole(source)
        described = state_folder.read_description(source)
        trainee = self.trainee
        self._check_same_model(source, described)
        same_layout = described["layout"] == self._layout()  # else its ranks' generators have no counterpart here
        state = self._model_state()
        if trainee.optimizer is not None:
            state["optimizer"] = sharded_optimizer_state(trainee.optimizer, state, trainee.groups, is_loading=True)
        if same_layout:
            state["rng"] = self._rng_slot(None)
        try:
            with nothing_executed(source):
                loaded = dist_checkpointing.load(state, str(source), strict=StrictHandling.RAISE_UNEXPECTED)
        except CheckpointingException as error:
            raise UserError(f"{source} does not fit this run: {error}") from None
        except (pickle.UnpicklingError, CheckpointException, OSError) as error:
            raise of_file(_reason(error), f"{source} cannot be read: {_reason(error)}") from None
        for number, chunk in enumerate(trainee.models):
            if trainee.lora:
                load_adapters(chunk, loaded[f"model{number}"])
            else:
                unwrap(chunk).load_state_dict(loaded[f"model{number}"], strict=True)
        if trainee.optimizer is not None:
            load_optimizer_state(
                trainee.optimizer, loaded["optimizer"], described["optimizer_step"], described["grad_scaler"]
            )
        if trainee.scheduler is not None:
            trainee.scheduler.load_state_dict(described["scheduler"])
        if same_layout:
            restore_rng(loaded["rng"])
        return Resumed(source, described["step"], described["progress"])

    def _latest(self) -> Path:
        """On rank 0."""
        state = state_folder.latest_state(self.root)
        newest = state_folder.finished_states(self.root)[-1]
        if state != newest:
            logger.warning("%s says %s; %s is newer and is not used", self.root / "latest", state.name, newest.name)
        return state

    def _go_back(self, source: Path, damaged: dict[Path, str]) -> None:
        """On rank 0."""
        aside = state_folder.go_back(source, damaged)
        for damage, name in zip(damaged.values(), aside, strict=True):
            words = "%s; kept as %s; going on from %s, the newest older state that is whole"
            logger.warning(words, damage, name.name, source.name)

    def _model_state(self) -> dict[str, Any]:
        trainee = self.trainee
        if trainee.lora:
            return {
                f"model{number}": sharded_adapters(chunk, trainee.model, trainee.groups)
                for number, chunk in enumerate(trainee.models)
            }
        metadata = {"dp_cp_group": trainee.groups.dp_cp}
        return {
            f"model{number}": unwrap(chunk).sharded_state_dict(metadata=metadata)
            for number, chunk in enumerate(trainee.models)
        }

    def _rng_slot(self, data: Any) -> ShardedObject:
        return ShardedObject("rng", data, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)

    def _layout(self) -> dict[str, Any]:
        return {"world_size": dist.get_world_size(), **self.trainee.parallel.model_dump()}

    def _bytes(self) -> int:
        """Size of a state: what is trained, and a master weight and two moments in fp32 with an optimizer."""
        trainee = self.trainee
        tensors = adapter_tensors(trainee.model, trainee.lora) if trainee.lora else trainee.model.tensors
        numbers = sum(torch.Size(shape).numel() for shape in tensors.values())
        return numbers * (self._dtype().itemsize + (12 if self.trainee.optimizer else 0))

    def _dtype(self) -> torch.dtype:
        return next(iter(self.trainee.models[0].parameters())).dtype

    def _describe(self, step: int, progress: dict[str, Any]) -> dict[str, Any]:
        trainee = self.trainee
        try:
            json.dumps(progress, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"progress must be plain JSON: {error}") from None
        return {
            "step": step,
            "model": model_signature(trainee.model),
            "dtype": str(self._dtype()),
            "lora": lora_signature(trainee.lora),
            "layout": self._layout(),
            "optimizer_step": optimizer_step(trainee.optimizer) if trainee.optimizer else None,
            "grad_scaler": grad_scaler_state(trainee.optimizer) if trainee.optimizer else {},
            "scheduler": trainee.scheduler.state_dict() if trainee.scheduler else None,
            "progress": progress,
        }

    def _check_same_model(self, source: Path, described: dict[str, Any]) -> None:
        trainee = self.trainee
        mine = model_signature(trainee.model)
        for field, value in mine.items():
            if described["model"].get(field) != value:
                raise UserError(
                    f"{source} is of another model: {field} is {described['model'].get(field)!r} there, {value!r} here"
                )
        lora = lora_signature(trainee.lora)
        if described.get("lora") != lora:
            raise UserError(
                f"{source} holds {_weights(described.get('lora'))}, this run trains {_weights(lora)}; set lora alike"
            )
        dtype = str(self._dtype())
        if described["dtype"] != dtype:
            raise UserError(f"{source} holds {described['dtype']} weights, this run trains {dtype}; set the same dtype")
        for name, live in (("optimizer_step", trainee.optimizer), ("scheduler", trainee.scheduler)):
            if live is not None and described[name] is None:
                raise UserError(f"{source} holds weights only, no {name.removesuffix('_step')}: it cannot be resumed")

    def _partial_folder(self, step: int) -> Path:
        """On rank 0."""
        state_folder.remove_leftovers(self.root)
        partial = self.root / f".{state_folder.folder_name(step)}{INCOMPLETE}{secrets.token_hex(4)}"
        with file_errors(f"cannot create {self.root} for checkpoints", "choose another output"):
            require_room(self.root, self._bytes())
            partial.mkdir(parents=True)
        return partial

    def _written(self) -> dict[str, str]:
        """On rank 0 the digests of the files that all ranks wrote, by name. Collective: a gather."""
        mine = {os.path.basename(path): digest for path, digest in _drain(self._digests)}
        found: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(mine, found if dist.get_rank() == 0 else None)
        return {name: digest for one in found if one for name, digest in one.items()}

    def _publish(self, partial: Path, step: int, described: dict[str, Any], digests: dict[str, str]) -> None:
        """On rank 0."""
        state = self.root / state_folder.folder_name(step)  # the same words whenever it fails
        with file_errors(f"cannot finish the checkpoint {state}"):
            hf = partial / state_folder.HF
            hf.mkdir()
            assert self.trainee.model.path is not None
            copy_side_files(self.trainee.model.path, hf, self._dtype())
            if not self.trainee.lora:  # a state of adapters needs its base anyway
                keep_carried(self.trainee.model, self.trainee.model.path, hf)
            state_folder.finish_state(partial, self.root, step, described, self.keep, digests)

    def _cannot_save(self, error: CheckpointException) -> Exception:
        """Every rank knows that one failed, only the coordinator what a writer made of it, only the file the reason."""
        found: list[Any] = [None] * dist.get_world_size()
        fault = next((one for _, one in _drain(self._digests) if isinstance(one, OSError)), None)
        said = of_file(fault, str(fault.strerror or fault)) if fault else None
        dist.all_gather_object(found, said or next((RuntimeError(str(_reason(error))) for _ in error.failures), None))
        if dist.get_rank() == 0:
            state_folder.remove_leftovers(self.root)
        dist.barrier()
        reasons = sorted((one for one in found if one), key=lambda one: isinstance(one, RuntimeError))
        reason = reasons[0] if reasons else RuntimeError("")
        return type(reason)(f"cannot write a checkpoint under {self.root}: {reason}; earlier ones are untouched")


def lora_signature(lora: LoraConfig | None) -> dict[str, Any] | None:
    """What two runs must agree on for the adapters of one to fit the other; None for a run on all weights."""
    return None if lora is None else lora.model_dump(mode="json", exclude={"adapter"})


def _drain[T](reports: queue.Queue[T]) -> list[T]:
    found = []
    with contextlib.suppress(queue.Empty):
        while True:
            found.append(reports.get_nowait())
    return found


def _weights(lora: dict[str, Any] | None) -> str:
    return (
        "all weights"
        if lora is None
        else f"adapters of rank {lora['rank']}, alpha {lora['alpha']} on {lora['targets']}"
    )


def _reason(error: BaseException) -> BaseException:
    """The first rank's error behind torch's collection of them."""
    if isinstance(error, CheckpointException):
        return next(iter(error.failures.values()))[0]
    return error


def model_signature(model: HFConfig) -> dict[str, Any]:
    """What two models must agree on for the weights of one to fit the other."""
    kinds: dict[str, Any] = {}
    if model.delta:
        kinds["delta"] = {**asdict(model.delta), "layers": list(model.delta.layers)}
    if model.latent:
        kinds["latent"] = asdict(model.latent)
    if model.windows:
        kinds["windows"] = list(model.windows)
    return {
        "model_type": model.family.model_type,
        "layers": model.layers,
        "hidden_size": model.hidden_size,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.intermediate_size,
        "vocab_size": model.vocab_size,
        "tied": model.tied,
        "experts": model.moe.experts if model.moe else 0,
        "expert_intermediate_size": model.moe.intermediate_size if model.moe else 0,
        "moe_layers": [i for i in range(model.layers) if model.is_moe_layer(i)],
    } | kinds
