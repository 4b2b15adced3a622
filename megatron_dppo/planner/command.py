"""`megatron-dppo plan`."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from megatron_dppo.errors import UserError
from megatron_dppo.json_object import read_json_object
from megatron_dppo.launch.arguments import real, whole
from megatron_dppo.models.lora.config import TARGETS, LoraConfig
from megatron_dppo.models.parallel import Recompute
from megatron_dppo.planner.gpus import GPUS, MEASURED, find_gpu
from megatron_dppo.planner.workload import EXPERT_IMBALANCE, Workload

if TYPE_CHECKING:
    from megatron_dppo.models.hf_config import HFConfig


_OF_CONFIG = {
    "tensor": "parallel.tensor",
    "pipeline": "parallel.pipeline",
    "expert": "parallel.expert",
    "context": "parallel.context",
    "recompute": "actor.recompute",
    "microbatch_tokens": "actor.max_tokens_per_microbatch",
    "sequence": "rollout.max_response_tokens",
    "prompt": "rollout.max_prompt_tokens",
    "prompts": "trainer.prompts_per_step",
    "samples": "trainer.samples_per_prompt",
    "mini_batch": "trainer.prompts_per_mini_batch",
    "ppo_epochs": "trainer.ppo_epochs",
    "lora_rank": "lora.rank",
    "lora_targets": "lora.targets",
    "topk": "rollout.top_k_logprobs",
    "engine_tp": "rollout.tensor_parallel",
    "rollout_gpus": "rollout.engines",
}
"""Options that a run's configuration decides, and by which key."""
_DEFAULTS = {
    "sequence": 17408,
    "prompt": 1024,
    "prompts": 256,
    "samples": 16,
    "mini_batch": 32,
    "ppo_epochs": 1,
    "topk": 0,
}
"""Of the options, without --config."""


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL_CONFIG | a.b=c",
        help="Hugging Face folder, or a config.json; with --config: config keys to change",
    )
    parser.add_argument("--config", type=Path, metavar="RUN.yaml", help="plan exactly this run, in place of a model")
    parser.add_argument("--gpus", type=whole(), required=True, help="GPUs of the whole job")
    parser.add_argument(
        "--gpu",
        default="h100-80g",
        help=f"their kind: {', '.join(GPUS)} (%(default)s); measured are {', '.join(MEASURED)}",
    )
    parser.add_argument(
        "--rollout-gpus", type=whole(0), help="GPUs of them that only generate; 0: engines share the GPUs"
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("cp", "context")):
        parser.add_argument(f"--{name}", type=whole(), dest=what, metavar="N", help=f"{what}-parallel size (searched)")
    parser.add_argument("--engine-tp", type=whole(), metavar="N", help="GPUs of one vLLM engine (searched)")
    parser.add_argument(
        "--recompute", choices=get_args(Recompute), help="activation recomputation (the least that fits)"
    )
    with_default = functools.partial(_with_default, parser)
    with_default("sequence", "tokens of the longest sequence")
    with_default("prompt", "of them prompt")
    parser.add_argument("--mean-response", type=whole(), help="tokens of an average response (all that fits)")
    parser.add_argument("--microbatch-tokens", type=whole(), help="budget of a pack (a whole sequence, 16384 at least)")
    skew = "rows of the fullest expert-parallel rank over the mean (%(default)s)"
    parser.add_argument("--imbalance", type=real(1, 1e6), default=EXPERT_IMBALANCE, help=skew)
    with_default("prompts", "per rollout step")
    with_default("samples", "answers per prompt")
    with_default("mini_batch", "prompts per gradient step")
    with_default("ppo_epochs", "passes over each rollout, trainer.ppo_epochs")
    parser.add_argument(
        "--lora-rank", type=whole(), metavar="N", help="train adapters of this rank, lora.rank (all weights)"
    )
    parser.add_argument(
        "--lora-targets", nargs="+", choices=TARGETS, help="layers that get adapters, lora.targets (all of these)"
    )
    with_default("topk", "recorded log-probabilities per token")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _with_default(parser: argparse.ArgumentParser, name: str, what: str) -> None:
    """An option whose default is filled in later, so that one that was given is told from one that was not."""
    default = _DEFAULTS[name]  # where that is 0, 0 may be given
    parser.add_argument(_option(name), type=whole(min(1, default)), help=f"{what} ({default})")


def _option(name: str) -> str:
    return {"tensor": "--tp", "pipeline": "--pp", "expert": "--ep", "context": "--cp"}.get(
        name, f"--{name.replace('_', '-')}"
    )


def run_plan(arguments: argparse.Namespace) -> int:
    """0 where something fits, 1 where nothing does, 2 where the configuration is refused."""
    if arguments.config is not None:
        return _plan_config(arguments)
    if not arguments.model:
        raise UserError("name a model (MODEL_CONFIG), or a run's configuration with --config RUN.yaml")
    if len(arguments.model) > 1:
        raise UserError(
            f"{' '.join(arguments.model[1:])}: without --config one MODEL_CONFIG is planned; config keys to change go "
            "with --config RUN.yaml"
        )
    arguments.model = Path(arguments.model[0])
    for name, value in _DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    return _plan_model(arguments)


def _plan_config(arguments: argparse.Namespace) -> int:
    """The plan of a run's configuration, or what `preflight` finds wrong with it."""
    from megatron_dppo.config.load import load_config
    from megatron_dppo.models.hf_config import load_hf_config
    from megatron_dppo.planner.fix import find_fix
    from megatron_dppo.planner.report import print_run, run_json
    from megatron_dppo.planner.run import beside_figures, engine_gpus, planned_run
    from megatron_dppo.preflight.rules import check_model, check_sections

    # Options that the configuration decides.
    for word in arguments.model:
        if "=" not in word:
            raise UserError(
                f"MODEL_CONFIG {word} and --config exclude each other: the configuration names its model; to plan "
                f"another one set model.path={word}"
            )
    for name, key in _OF_CONFIG.items():
        if getattr(arguments, name) is not None:
            raise UserError(
                f"{_option(name)} goes with MODEL_CONFIG; with --config the configuration decides: set {key}=VALUE"
            )
    # The rules that `train` and `doctor` know too.
    config = load_config(arguments.config, arguments.model)
    findings = list(check_sections(config))
    model = load_hf_config(config.model.path)
    if arguments.gpus > engine_gpus(config):
        findings += check_model(config, model, arguments.gpus - engine_gpus(config))
    for finding in findings:
        print(finding, file=sys.stderr)
    if any(finding.level == "error" for finding in findings):
        return 2
    # The plan.
    run = planned_run(
        config,
        model,
        find_gpu(arguments.gpu),
        arguments.gpus,
        mean_response=arguments.mean_response,
        expert_imbalance=arguments.imbalance,
    )
    plan = run.plan()
    fix = find_fix(run) if plan.problem else None
    beside = beside_figures(config, plan)
    if arguments.json:
        print(json.dumps(run_json(plan, fix, beside), indent=1))
    else:
        from megatron_dppo.launch.console import CommandConsole

        print_run(CommandConsole(), plan, fix, beside)
    return 1 if plan.problem else 0


def _plan_model(arguments: argparse.Namespace) -> int:
    """What fits of a model, searched."""
    from megatron_dppo.planner.report import print_report, result_json
    from megatron_dppo.planner.run import recommended_config
    from megatron_dppo.planner.search import Wanted, search

    model = read_model(arguments.model)
    workload = _workload(arguments)
    wanted = Wanted(
        tensor=arguments.tensor,
        pipeline=arguments.pipeline,
        context=arguments.context,
        expert=arguments.expert,
        recompute=arguments.recompute,
        microbatch_tokens=arguments.microbatch_tokens,
        engine_tensor=arguments.engine_tp,
        rollout_gpus=arguments.rollout_gpus,
        expert_imbalance=arguments.imbalance,
        lora=_lora(arguments, model),
    )
    result = search(model, find_gpu(arguments.gpu), arguments.gpus, workload, wanted)
    if not result.fitting and not result.others:
        raise UserError(f"no layout is possible: {result.impossible[0][1]}")
    path = arguments.model.parent if arguments.model.is_file() else arguments.model
    config = None
    if result.best:
        config = recommended_config(result.best, path, prompts_per_step=arguments.prompts)
    if arguments.json:
        print(json.dumps(result_json(result, config), indent=1))
    else:
        from megatron_dppo.launch.console import CommandConsole

        print_report(CommandConsole(), result, config)
    return 0 if result.best else 1


def read_model(path: Path) -> HFConfig:
    """The model of a folder or of a config file by any name. Weights are not looked for."""
    from megatron_dppo.models.hf_config import load_hf_config, resolve_hf_config

    if path.suffix in (".yaml", ".yml"):
        raise UserError(f"{path}: is no config.json; a run's configuration is planned with --config {path}")
    if not path.is_file():
        return load_hf_config(path)
    if "model_type" not in (raw := read_json_object(path)):
        raise UserError(f"{path}: is no config.json of a model: it has no model_type; name the model's folder")
    return resolve_hf_config(raw, path=path.parent)


def _lora(arguments: argparse.Namespace, model: HFConfig) -> LoraConfig | None:
    from megatron_dppo.models.lora.size import check_targets

    rank, targets = arguments.lora_rank, arguments.lora_targets
    if rank is None:
        if targets:
            raise UserError("--lora-targets: give --lora-rank as well; without it all weights are trained")
        return None
    if targets and len(set(targets)) < len(targets):
        raise UserError(f"--lora-targets {' '.join(targets)}: name each once")
    config = LoraConfig(rank=rank, targets=tuple(targets or TARGETS))
    check_targets(model, config)
    return config


def _workload(arguments: argparse.Namespace) -> Workload:
    if arguments.prompt >= arguments.sequence:
        raise UserError(f"--prompt {arguments.prompt} leaves no room for a response in --sequence {arguments.sequence}")
    if arguments.prompts % arguments.mini_batch:
        raise UserError(f"--mini-batch {arguments.mini_batch} does not divide --prompts {arguments.prompts}")
    response = arguments.sequence - arguments.prompt
    mean = arguments.mean_response if arguments.mean_response is not None else response
    if mean > response:
        raise UserError(f"--mean-response {mean}: must be from 1 to {response} (--sequence less --prompt)")
    return Workload(
        sequences=arguments.prompts * arguments.samples,
        mini_batches=arguments.prompts // arguments.mini_batch,
        prompt_tokens=arguments.prompt,
        response_tokens=response,
        mean_response_tokens=mean,
        topk=arguments.topk,
        ppo_epochs=arguments.ppo_epochs,
    )
