"""`megatron-dppo train`: everything a run needs, put together and taken apart again."""

from __future__ import annotations

import datetime
import gc
import secrets
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path

import torch

from megatron_dppo.actor import runtime as actor_runtime
from megatron_dppo.actor.actor import MegatronActor
from megatron_dppo.actor.runtime import Runtime
from megatron_dppo.checkpoint.hf_files import HFFiles
from megatron_dppo.checkpoint.hf_import import check_tensors, load_hf_weights, stores_stacked_experts
from megatron_dppo.checkpoint.hf_save import save_hf_checkpoint
from megatron_dppo.checkpoint.peft_adapter import check_peft_adapter, load_peft_adapter, save_peft_adapter
from megatron_dppo.checkpoint.random_weights import fill_random
from megatron_dppo.checkpoint.state_folder import latest_state
from megatron_dppo.config.load import read_tree, recorded, save_config
from megatron_dppo.config.schema import Config
from megatron_dppo.launch.folders import require_shared_memory, require_writable
from megatron_dppo.launch.heartbeat import Heartbeat
from megatron_dppo.launch.lease import FOLDER as LEASE
from megatron_dppo.launch.lease import lease
from megatron_dppo.launch.logs import FOLDER as LOGS
from megatron_dppo.launch.logs import logging_to
from megatron_dppo.launch.stop import StopRequest
from megatron_dppo.models.build import build_model
from megatron_dppo.models.experts.grouped import slow_paths
from megatron_dppo.models.hf_config import HFConfig, load_hf_config
from megatron_dppo.models.lora.attach import attach_adapters
from megatron_dppo.models.megatron_config import transformer_config
from megatron_dppo.preflight.finding import raise_first
from megatron_dppo.preflight.rules import check_model, check_sections
from megatron_dppo.rollout.engine import FleetStatus, RolloutFleet
from megatron_dppo.rollout.start import open_fleet, require_cluster
from megatron_dppo.tasks.tokenizer import load_tokenizer
from megatron_dppo.trainer.agreement import check_agreement
from megatron_dppo.trainer.checkpoints import Checkpoints, checkpoint_root
from megatron_dppo.trainer.evaluation import Evaluator
from megatron_dppo.trainer.history import ADAPTER_FOLDER, CONFIG_FILE, METRICS_FILE, MODEL_FOLDER, History
from megatron_dppo.trainer.loop import Controller, Trainer
from megatron_dppo.trainer.progress import Progress
from megatron_dppo.trainer.resume import check_changed, facts, weights_fingerprint
from megatron_dppo.trainer.sinks import open_sinks, require_services
from megatron_dppo.trainer.summary import Took, print_summary
from megatron_dppo.trainer.task_suite import build_task_suite
from megatron_dppo.trainer.tracking import Tracker, require_unused


def train(
    config: Config,
    engines: Callable[..., AbstractContextManager[RolloutFleet | None]] = open_fleet,
    stop: StopRequest | None = None,
) -> int:
    """Train as `config` says, on all ranks of a torchrun job. Returns the exit code.

    engines  `open_fleet`, or what takes the same and gives engines that are up already: a process that trains several
             times, one run after another, need not start them again. They get the run's weights before anything else.
    stop     of `run.dir`; such a process reads in it whether it was asked to stop, also in the last step

    What can be checked is checked before the engine or a process group is started. The engine loads in the background
    while the ranks build their model. Everything started here is closed on the way out, whatever the way.
    """
    started = time.monotonic()
    # What can be checked before anything is started.
    require_cluster()
    require_shared_memory()
    check_changed(config)
    findings = list(check_sections(config))
    raise_first(findings)
    hf_config = load_hf_config(config.model.path)
    findings += check_model(config, hf_config, actor_runtime.world_size())
    raise_first(findings)
    if config.lora and config.lora.adapter:
        check_peft_adapter(config.lora.adapter, hf_config, config.lora)
    if not config.model.random_weights:
        files = HFFiles(config.model.path)
        check_tensors(files, hf_config, stores_stacked_experts(files, hf_config))
    rank = actor_runtime.rank()
    with ExitStack() as stack:
        # The run's folder, and on rank 0 the task.
        require_writable(config.run.dir, named=f"run.dir={config.run.dir}", make=True)
        if rank == 0:  # the others write nothing before they have met it
            stack.enter_context(lease(config.run.dir / LEASE, of=f"run.dir={config.run.dir}"))
            if config.trainer.resume:  # others may see it late, and take what this rank sees
                latest_state(checkpoint_root(config))
        if not config.trainer.resume:
            require_unused(config.run.dir)
        suite = progress = None
        if rank == 0:
            require_services(config.tracking)
            dated = _dated(config)
            suite = build_task_suite(dated, load_tokenizer(config.model.path))
            weights = weights_fingerprint(config.model.path, random=config.model.random_weights)
            stack.callback(suite.close)
            progress = stack.enter_context(Progress(total_steps=config.trainer.steps, title=config.run.name))
            progress.phase("starting ranks")
        # The ranks, which know each other from here on.
        stack.callback(actor_runtime.stop)
        runtime = actor_runtime.start(
            config.parallel, seed=config.run.seed, timeout_minutes=config.run.collective_timeout_minutes
        )
        stack.enter_context(logging_to(config.run.dir, rank))
        heartbeat = Heartbeat(config.run.dir, rank, limit=config.run.hang_minutes * 60, watch_peers=rank == 0)
        stack.enter_context(heartbeat.running())
        check_agreement(runtime, config)
        # The engines; they load while the ranks build their model.
        rollout = config.rollout
        if config.model.random_weights:
            rollout = rollout.model_copy(update={"load_format": "dummy"})
        # A cluster may have runs of one name, or what is left of the one that this goes on with.
        namespace = f"{config.run.name}-{config.run.seed}-{secrets.token_hex(4)}"
        if progress:
            progress.phase("starting engines")

        def made(fleet: RolloutFleet) -> None:
            assert progress is not None
            progress.detail = lambda: _said(fleet.status())

        opened = engines(
            runtime, config.model.path, rollout, namespace=namespace, logs=config.run.dir / LOGS, made=made
        )
        fleet = stack.enter_context(opened)
        if progress:
            progress.phase("loading the model")
        # The model, and the state that this run goes on from.
        actor = build_actor(runtime, config, hf_config)
        # A full garbage collection looks at some 570,000 objects of imported modules: 0.3 s in the middle of a step.
        gc.collect()
        gc.freeze()
        stack.callback(gc.unfreeze)
        fixed = runtime.broadcast(facts(config, task=suite.task.fingerprint, weights=weights) if suite else None)
        checkpoints = Checkpoints(config, fixed, actor)
        first_step = checkpoints.restore() if config.trainer.resume else 0
        # What rank 0 alone has: what is logged, and who samples and evaluates.
        controller = None
        if fleet is not None and suite is not None and progress is not None:
            save_config(dated, config.run.dir / CONFIG_FILE)
            resumed_at = first_step if config.trainer.resume else None
            sinks = open_sinks(
                config.tracking,
                run=config.run.name,
                folder=config.run.dir,
                settings=recorded(config),
                resume=config.trainer.resume,
            )
            tracker = stack.enter_context(closing(Tracker(config.run.dir, resume_step=resumed_at, sinks=sinks)))
            evaluator = Evaluator(fleet, suite, config.evaluation, config.rollout, config.run.seed)
            controller = Controller(fleet, suite, evaluator, tracker, progress)
            progress.begin(first_step)
            for finding in findings:
                progress.note(str(finding))
            if runtime.device.type == "cuda" and (slow := slow_paths(torch.cuda.get_device_capability())):
                progress.note(slow)
            for line in suite.report:
                progress.note(line)
            if resumed_at is not None:
                progress.note(f"going on after step {first_step}, saved in {checkpoint_root(config)}")
            if first_step >= (steps := config.trainer.steps):
                progress.note(f"step {first_step}: trainer.steps={steps} is reached, nothing is left to train")
        trainer = Trainer(
            runtime,
            config,
            actor=actor,
            checkpoints=checkpoints,
            controller=controller,
            heartbeat=heartbeat,
            stop=stop or StopRequest(config.run.dir),
        )
        finished = trainer.run(first_step, lambda: _export(runtime, config, actor, hf_config))
    if finished and runtime.is_controller:
        now = time.monotonic()
        _report(config, Took(now - started, trainer.began - started, first_step + 1, trainer.evaluated))
    return 0


def _said(status: FleetStatus) -> str:
    """What engines do, in a few words."""
    parts = []
    if status.ready < status.engines:
        parts.append(f"engines ready: {status.ready} of {status.engines}")
    if status.asked:
        parts.append(f"answers: {status.answered} of {status.asked}")
    return ", ".join(parts)


def build_actor(runtime: Runtime, config: Config, hf_config: HFConfig) -> MegatronActor:
    """The actor of this rank, with the weights of `model.path` or random ones."""
    megatron_config = transformer_config(
        hf_config,
        config.parallel,
        params_dtype=getattr(torch, config.actor.dtype),
        recompute=config.actor.recompute,
        recompute_layers=config.actor.recompute_layers,
        token_dispatcher=config.actor.token_dispatcher,
        load_balancing_loss=config.actor.load_balancing_loss,
        router_z_loss=config.actor.router_z_loss,
        router_bias_update_rate=config.actor.router_bias_update_rate,
        **config.actor.megatron_options().transformer,
    )
    chunks = build_model(hf_config, megatron_config, runtime.groups)
    if config.model.random_weights:
        fill_random(chunks, hf_config, runtime.groups, config.run.seed)
    else:
        load_hf_weights(chunks, hf_config, runtime.groups)
    if config.lora:
        attach_adapters(chunks, hf_config, runtime.groups, config.lora, seed=config.run.seed)
        if config.lora.adapter:
            load_peft_adapter(chunks, hf_config, config.lora, config.lora.adapter)
    return MegatronActor(
        runtime,
        chunks,
        parallel=config.parallel,
        config=config.actor,
        optimizer=config.optimizer,
        preset=config.algorithm.resolve(),
        hf_config=hf_config,
        temperature=config.rollout.temperature,
        normaliser=config.algorithm.normaliser or float(config.rollout.max_response_tokens),
        lora=config.lora,
        reference_kl=config.algorithm.reference_kl.resolve() if config.algorithm.reference_kl else None,
    )


def _export(runtime: Runtime, config: Config, actor: MegatronActor, hf_config: HFConfig) -> None:
    """What a finished run leaves for others to load. Collective."""
    folder, again = config.run.dir, config.trainer.resume
    if config.lora:
        save_peft_adapter(folder / ADAPTER_FOLDER, actor.model, hf_config, runtime.groups, config.lora, overwrite=again)
    if config.trainer.export_hugging_face:
        save_hf_checkpoint(folder / MODEL_FOLDER, actor.model, hf_config, runtime.groups, overwrite=again)


def _dated(config: Config) -> Config:
    """With the date that a chat template may show: the day on which the run began, also when it goes on."""
    file, began = config.run.dir / CONFIG_FILE, None
    if config.task.date is None and config.trainer.resume and file.is_file():
        began = (read_tree(file).get("task") or {}).get("date")
    task = config.task.model_dump() | {"date": config.task.date or began or datetime.date.today()}
    return config.model_copy(update={"task": type(config.task).model_validate(task)})


def _report(config: Config, took: Took) -> None:
    """The closing table and the curves."""
    from megatron_dppo.trainer.plots import plot_runs  # with matplotlib, for one rank at its end

    folder = config.run.dir
    history = History.read(folder)
    picture = folder / "curves.png"
    plot_runs({config.run.name: history}, picture, title=config.run.name)
    paths: dict[str, Path] = {"metrics": folder / METRICS_FILE, "curves": picture}
    if config.trainer.export_hugging_face:
        paths["model"] = folder / MODEL_FOLDER
    if config.lora:
        paths["adapter"] = folder / ADAPTER_FOLDER
    print_summary(history, title=config.run.name, took=took, paths=paths)
