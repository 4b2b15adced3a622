"""The whole program and the training step on all GPUs of one machine of one, two, four or eight, in one call.

    python tools/bench_cluster.py --out OUT                    # every part that fits the GPUs there are
    python tools/bench_cluster.py --out OUT --only colocated   # one of them
    python tools/bench_cluster.py --out OUT --dry-run [--gpus N]   # every code path on a CPU: tiny shapes, N (4) ranks

Each part is a job of its own with a time limit: one that fails or hangs costs the others nothing. OUT/cluster.json and
OUT/cluster.md are written anew after each part, so that what ran before a machine goes away is kept.

    part        GPUs  what runs
    leak        1     run_qwen3_moe_dppo.sh --random-weights: thirty steps in turns on one GPU, its memory after each
    warm-empty, warm-filled   1   the same awake, rollout.compile_cache empty and filled: the first rollouts' seconds
    learner, bf16-0, fp8-0, ... fp8-2   1   run_tiny_moe_dppo.sh: ten steps, three seeds, of a model that FP8's blocks
                      accept, which the first of these makes on a CPU (where it is absent, whatever --only names)
    broadcast   2-8   bench_sync.py: what NCCL needs for the bytes of the model of colocated and fleet, half of
                      the ranks sending
    fleet       2-8   run_qwen3_moe_dppo.sh --random-weights: half of the GPUs for the trainer, half for engines
    colocated   2-8   the same, each GPU trainer and engine in turn
    keep        2-8   colocated, with all optimizer state staying on the GPU
    ep4, pp2-ep2, tp2-ep2, cp2-ep2   4   bench_actor_step.py: training steps of these layouts, at two depths
    agreement   4     bench_actor_step.py: the same batch under EP4, PP2 EP2 and on one GPU
    whole       8     bench_actor_step.py: a step of all 48 layers of Qwen3-30B-A3B under EP8
    sync-whole  8     run_qwen3_moe_dppo.sh --random-weights, all 48 layers: 4 ranks, engines of 2 GPUs on the others
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import out_folder, real

ROOT = Path(__file__).resolve().parent.parent
PROGRAM, LEARNING = ROOT / "examples/run_qwen3_moe_dppo.sh", ROOT / "examples/run_tiny_moe_dppo.sh"
TRIAL = (
    *("rollout.top_k_logprobs=20", "rollout.max_prompt_tokens=256", "rollout.max_response_tokens=192"),
    *("rollout.router_replay=true", "actor.router_replay=r3", "actor.recompute=none", "trainer.steps=6"),
    *("parallel.tensor=1", "parallel.sequence_parallel=false", "algorithm.preset=dppo-topk-tv"),
    "actor.max_tokens_per_microbatch=9216",  # 16 layers without recomputation beside 5.8e9 weights a rank (fleet)
)
LEARNS = (
    *("parallel.tensor=1", "parallel.expert=1", "parallel.sequence_parallel=false", "actor.dtype=bfloat16"),
    *("rollout.dtype=bfloat16", "rollout.enable_sleep=false", "trainer.steps=10", "trainer.checkpoint_every=0"),
    *("trainer.export_hugging_face=false", "evaluation.every=0", "optimizer.decay_steps=80"),
)
"""Of the tiny model's runs: they begin where its warm-up ended, about a third of the answers right."""
TINY = (
    *("actor.dtype=float32", "rollout.dtype=float32", "rollout.kv_cache_mib=64", "rollout.enforce_eager=true"),
    *("rollout.max_response_tokens=16", "rollout.cpu_threads=1", "trainer.steps=2", "trainer.prompts_per_step=8"),
    *("trainer.samples_per_prompt=2", "trainer.prompts_per_mini_batch=4", "rollout.max_num_seqs=32"),
)
"""What makes the same run one for a CPU."""
SHOWN = (
    *("time/step_s", "time/rollout_s", "time/hand_over_s", "time/train_s", "time/sync_s", "sync/transfer_s"),
    *("sync/gb_per_s", "sync/bytes", "sync/worker_bytes", "sync/begin_s", "sync/end_s", "sync/lend_s"),
    *("sync/lend_room_s", "sync/lend_weights_s", "sync/lend_copy_s", "sync/lend_free_s", "sync/lend_cache_s"),
    *("sync/lent_bytes", "data/tokens", "memory/rank_allocated_gib", "memory/rank_peak_gib"),
    *("memory/gpu_used_gib", "sync/worker_gpu_used_gib", "reward/mean", "policy/masked_fraction"),
)
"""Metrics of a run's steps that the report has: the median of all steps but the first, and every value."""

DEPTHS = {
    "ep4": ("full-ep4-4", "full-ep4-2"),
    "pp2-ep2": ("full-pp2-ep2-8", "full-pp2-ep2-4"),
    "tp2-ep2": ("full-tp2-ep2-dp2-4", "full-tp2-ep2-dp2-2"),
    "cp2-ep2": ("full-cp2-ep2-4", "full-cp2-ep2-2"),
}
"""Cases of `bench_actor_step.py` for 4 GPUs: each layout at two depths."""


@dataclass(frozen=True)
class Part:
    """One job. Its result is the `metrics.jsonl` of its run folder, its `bench.json`, or the JSON that it prints."""

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str]
    needs: Path | None = None
    """A model that the part `learner` makes."""


def chosen(parts: Sequence[Part], only: Sequence[str]) -> list[Part]:
    """Those that `only` names, or all, and who makes the model that one of them lacks."""
    named = [part for part in parts if not only or part.name in only]
    lacks = any(part.needs and not part.needs.exists() for part in named)
    return [part for part in parts if part in named or (lacks and part.name == "learner")]


def parts(gpus: int, out: Path, *, tiny: bool, settings: Sequence[str] = ()) -> list[Part]:
    """What can run on `gpus` GPUs, in the order of worth."""
    python, half = sys.executable, gpus // 2
    layers = 2 if tiny else 6 if gpus < 4 else 16

    def program(name: str, ranks: int, seconds: float, *overrides: str, layers: int | None = layers) -> Part:
        size = [] if layers is None else ["--layers", str(layers)]
        command = [python, "-u", str(PROGRAM), "--random-weights", *size, *TRIAL, *overrides, *(TINY if tiny else ())]
        command += settings
        folder = out / "work" / name
        environment = {"NPROC": str(ranks), "RUN_DIR": str(folder / "run")}
        environment["MODEL_DIR"] = str(folder / "model" if tiny else out / "work" / f"shapes-{layers or 48}")
        return Part(name, command, seconds, environment)

    def steps(name: str, seconds: float, *cases: str) -> Part:
        command = [python, str(ROOT / "tools/bench_actor_step.py"), "--out", str(out / "work" / name), "--only", *cases]
        command += ["--total", str(seconds - 30), "--timeout", str(seconds - 20)]
        return Part(name, [*command, *(["--tiny"] if tiny else [])], seconds, {})

    if gpus == 1:
        return _alone(out, program, tiny=tiny)
    turns = ("rollout.placement=colocated", "rollout.enable_sleep=true", f"parallel.expert={gpus}")
    if gpus == 2:  # what is asked of them is the change of owners: no minutes for CUDA graphs
        turns += ("rollout.gpu_memory_utilization=0.2", "rollout.kv_cache_mib=8192")
        turns += ("rollout.enforce_eager=true", "trainer.steps=4")
    else:
        turns += ("rollout.gpu_memory_utilization=0.5",)
    fleet = ("rollout.placement=fleet", f"rollout.engines={half}", f"parallel.expert={half}")
    found = [
        program("fleet", half, 300, *fleet, "rollout.weight_sync_bucket_mib=512"),
        program("colocated", gpus, 300, *turns),
        program("keep", gpus, 300, *turns, "optimizer.keep_on_gpu_gib=60"),
    ]
    if not tiny:
        gib = {2: 8, 4: 20}.get(gpus, 57)
        command = [python, "-m", "torch.distributed.run", "--nproc-per-node", str(gpus)]
        command += [str(ROOT / "tools/bench_sync.py"), "--gib", str(gib), "--roots", str(half)]
        found.insert(0, Part("broadcast", command, 120, {}))
    if gpus == 4:
        found += [steps(name, 200, *depths) for name, depths in DEPTHS.items()]
        found.append(steps("agreement", 200, "same-1", "same-ep4", "same-pp2-ep2"))
    if gpus == 8:
        found.append(steps("whole", 200, "whole-ep8"))
        engines = ("rollout.placement=fleet", "rollout.tensor_parallel=2", "rollout.engines=2", "parallel.expert=4")
        found.append(program("sync-whole", 4, 300, *engines, "rollout.enforce_eager=true", layers=None))
    return found


def _alone(out: Path, program: Callable[..., Part], *, tiny: bool) -> list[Part]:
    small = ("rollout.placement=colocated", "rollout.enforce_eager=true", "rollout.kv_cache_mib=4096")
    small += ("rollout.gpu_memory_utilization=0.2",)
    short = ("rollout.max_response_tokens=16", "trainer.prompts_per_step=8", "trainer.prompts_per_mini_batch=4")
    found = [program("leak", 1, 200, *small, *short, "rollout.enable_sleep=true", "trainer.steps=30", layers=1)]
    warm = ("rollout.enable_sleep=false", f"rollout.compile_cache={out / 'work/compiled'}", "trainer.steps=3")
    found += [program(f"warm-{folder}", 1, 150, *small, *warm, layers=2) for folder in ("empty", "filled")]
    model = out / "work" / "learner"
    maker = [sys.executable, str(ROOT / "examples/tiny_moe_dppo/make_model.py"), str(model), "--width", "2"]
    found.append(Part("learner", [*maker, *(["--random"] if tiny else [])], 400, {}))
    for seed in range(3):
        for name, kind in (("bf16", "none"), ("fp8", "fp8")):
            environment = {"NPROC": "1", "SEED": str(seed), "MODEL_DIR": str(model)}
            environment["RUN_DIR"] = str(out / "work" / f"{name}-{seed}" / "run")
            command = [sys.executable, "-u", str(LEARNING), *LEARNS, *small, f"rollout.quantization={kind}"]
            command += [*TINY, "trainer.prompts_per_mini_batch=8", "rollout.quantization=none"] if tiny else []
            found.append(Part(f"{name}-{seed}", command, 300, environment, needs=model))
    return found


def make_tiny_model(part: Part) -> None:
    """Where the part of a dry run has its model, so that the program finds it and writes no large shapes."""
    model = Path(part.environment.get("MODEL_DIR", ""))
    if "MODEL_DIR" in part.environment and not part.needs and not model.exists():
        maker = [sys.executable, str(ROOT / "examples/tiny_moe_dppo/make_model.py"), str(model), "--random"]
        subprocess.run(maker, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=out_folder, required=True, help="folder of the results; made when absent")
    parser.add_argument("--only", nargs="*", metavar="PART", help="of the table above")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes, on a CPU")
    parser.add_argument("--gpus", type=int, default=4, help="of a machine that --dry-run makes believe (default 4)")
    parser.add_argument("--set", nargs="*", default=[], metavar="A.B=C", help="overrides of the program's parts")
    parser.add_argument("--total", type=real(), default=560.0, help="seconds after which no part starts or goes on")
    arguments = parser.parse_args()
    from torch.cuda import device_count

    gpus = arguments.gpus if arguments.dry_run else device_count()
    if gpus not in (1, 2, 4, 8):
        print(f"bench_cluster: {gpus} GPUs here; it is for 1, 2, 4 or 8 (--dry-run needs none)", file=sys.stderr)
        return 2
    found: dict[str, Any] = {}
    end = time.monotonic() + arguments.total
    failed = False
    every = parts(gpus, arguments.out.resolve(), tiny=arguments.dry_run, settings=arguments.set)
    if unknown := set(arguments.only or ()) - {part.name for part in every}:
        names = ", ".join(part.name for part in every)
        parser.error(f"argument --only: {', '.join(sorted(unknown))}: with {gpus} GPUs the parts are {names}")
    for part in chosen(every, arguments.only or ()):
        if arguments.dry_run:
            make_tiny_model(part)
        limit = end - time.monotonic() if arguments.dry_run else min(part.seconds, end - time.monotonic())
        if limit < 20:
            found[part.name] = {"failure": "not started: no time left"}
        elif part.needs and not part.needs.exists():  # it would make a model of its own, which FP8 refuses
            found[part.name] = {"failure": "not started: learner made no model"}
        else:
            found[part.name] = run(part, arguments.out, limit)
        failed |= "failure" in found[part.name]
        (arguments.out / "cluster.json").write_text(json.dumps(found, indent=1) + "\n")
        (arguments.out / "cluster.md").write_text(report(found))
        print(f"{part.name}: {found[part.name].get('failure', 'ok')}", flush=True)
    print((arguments.out / "cluster.md").read_text())
    return 1 if failed else 0


def run(part: Part, out: Path, limit: float) -> dict[str, Any]:
    """The part's result, with how it ended; its output is kept in `OUT/PART.log`."""
    environment = os.environ | part.environment | {"PYTHON": sys.executable, "PYTHONUNBUFFERED": "1"}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "VLLM_USE_FLASHINFER_SAMPLER": "0"}
    log, start = out / f"{part.name}.log", time.monotonic()
    with open(log, "wb") as output:
        process = subprocess.Popen(part.command, env=environment, stdout=output, stderr=output, start_new_session=True)
        try:
            status: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            status = None
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    found: dict[str, Any] = {"seconds": round(time.monotonic() - start, 1), "command": part.command[1:]}
    if status != 0:
        found["failure"] = f"ended after {limit:.0f} s" if status is None else f"exit status {status}, see {log.name}"
    return found | result(part, log, out)


def result(part: Part, log: Path, out: Path) -> dict[str, Any]:
    """What the part measured, as far as it came."""
    metrics = Path(part.environment.get("RUN_DIR", "")) / "metrics.jsonl"
    if "RUN_DIR" in part.environment:
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return {"steps": [row for row in rows if "time/step_s" in row]}
    bench = out / "work" / part.name / "bench.json"
    if bench.exists():
        return {"bench": json.loads(bench.read_text()), "table": bench.with_suffix(".md").read_text()}
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]
    return {"printed": json.loads(lines[-1])} if lines else {}


def report(found: dict[str, Any]) -> str:
    """The results as Markdown."""
    text = []
    for name, one in found.items():
        text.append(f"## {name}\n\n{one.get('failure', 'ran to its end')}; {one.get('seconds', 0)} s\n")
        if "printed" in one:
            text.append(f"{one['printed']['median_gb_per_s']:.0f} GB/s, {one['printed']['bytes'] / 1e9:.1f} GB\n")
        if one.get("steps"):
            text.append(_steps(one["steps"]))
        text.append(one.get("table", ""))
    return "\n".join(text)


def _steps(rows: Sequence[dict[str, Any]]) -> str:
    lines = ["| metric | median after step 1 | every step |", "|---|---|---|"]
    for metric in SHOWN:
        values = [row[metric] for row in rows if row.get(metric) is not None]
        if values:
            middle = statistics.median(values[1:] or values)
            lines.append(f"| {metric} | {middle:.4g} | {' '.join(f'{v:.4g}' for v in values)} |")
    for key, seconds in (("rolling out", "time/rollout_s"), ("training", "time/train_s")):
        rates = [row["data/tokens"] / row[seconds] for row in rows[1:] or rows if row.get(seconds)]
        if rates:
            lines.append(f"| sequence tokens/s while {key} | {statistics.median(rates):.0f} | |")
    gaps = ("parity/max_abs_logp_gap", "parity_without_replay/max_abs_logp_gap")
    lines += [f"| {metric} (step 1) | {rows[0][metric]:.4g} | |" for metric in gaps if metric in rows[0]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_status(main))
