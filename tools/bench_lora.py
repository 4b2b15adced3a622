"""Memory, step time and correctness of LoRA beside full training on one GPU, at Qwen3-30B-A3B's shapes.

    python tools/bench_lora.py --out results              # everything
    python tools/bench_lora.py --out results --tiny       # every code path on a CPU, a tiny model

Random weights, no files, no network. Each trial is a process of its own, so one that does not fit leaves the others
their memory. Full training and LoRA take turns at the same number of layers; then either is tried with as many layers
as fit. Writes bench_lora.json and bench_lora.md, the planner's peak and step beside the measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import out_folder, real, require_gpu, whole

sys.path.insert(0, str(Path(__file__).parent))

ROUNDS = 2
"""Processes of each kind that take turns at the same number of layers."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=out_folder, required=True, help="folder of the results; made when absent")
    parser.add_argument("--tiny", action="store_true", help="tiny model and sequences, for a CPU")
    parser.add_argument("--layers", type=whole(), default=4, help="layers of the comparison at the same size")
    parser.add_argument("--most-full", type=whole(), nargs="*", default=[6, 5, 4], help="layers to try, most first")
    parser.add_argument("--most-lora", type=whole(), nargs="*", default=[38, 36, 33, 30, 26], help="the same for LoRA")
    parser.add_argument("--steps", type=whole(), default=5, help="timed steps of a trial")
    parser.add_argument("--rank", type=whole(), default=32)
    parser.add_argument("--timeout", type=real(), default=150.0, help="seconds after which a trial is ended")
    parser.add_argument("--trial", choices=["agreement", "full", "lora"], help=argparse.SUPPRESS)
    parser.add_argument(
        "--recompute-layers", type=whole(), metavar="N", help="of the most layers of LoRA, the first N alone"
    )
    parser.add_argument("--recompute", default="none", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.trial:
        run_trial(arguments)
        return 0
    require_gpu(parser, tiny=arguments.tiny)
    return drive(arguments)


def drive(arguments: argparse.Namespace) -> int:
    """All trials, one after another, and the report."""
    found: dict[str, Any] = {"agreement": _trial(arguments, "agreement", 2, "none")}
    same: dict[str, list[dict[str, Any]]] = {}
    for recompute in ("none", "full"):
        for number in range(ROUNDS):
            for kind in ("full", "lora") if number % 2 == 0 else ("lora", "full"):
                same.setdefault(f"{kind} {recompute}", []).append(_trial(arguments, kind, arguments.layers, recompute))
    found["same"] = same
    for kind, candidates in (("full", arguments.most_full), ("lora", arguments.most_lora)):
        tried = []
        fewer = arguments.recompute_layers if kind == "lora" else None
        for layers in [2] if arguments.tiny else candidates:
            tried.append(_trial(arguments, kind, layers, "full", fewer))
            if "error" not in tried[-1]:
                break
        found[f"most {kind}"] = tried
    text = report(found, arguments.rank)
    (arguments.out / "bench_lora.json").write_text(json.dumps(found, indent=1))
    (arguments.out / "bench_lora.md").write_text(text)
    print(text, flush=True)
    trials = [found["agreement"], *(t for many in same.values() for t in many)]
    return 1 if any("error" in t for t in trials) or not found["agreement"].get("agrees") else 0


def run_trial(arguments: argparse.Namespace) -> None:
    """The trial that the arguments name, in this process; writes a JSON file."""
    import torch
    from lora_step.agreement import agreement
    from lora_step.trials import Trial, timing

    from megatron_dppo.models.lora.config import LoraConfig

    trial = Trial(arguments.layers, arguments.recompute, arguments.recompute_layers, tiny=arguments.tiny)
    lora = LoraConfig(rank=arguments.rank, alpha=2.0 * arguments.rank)
    if arguments.trial == "agreement":
        found = agreement(trial, lora)
    else:
        found = timing(trial, lora if arguments.trial == "lora" else None, arguments.steps)
    device = torch.cuda.get_device_properties() if torch.cuda.is_available() else None
    found["device"], found["device_bytes"] = (device.name, device.total_memory) if device else ("CPU", 0)
    _file(arguments.out, arguments.trial, arguments.layers, arguments.recompute).write_text(json.dumps(found))
    trial.close()


def _file(out: Path, kind: str, layers: int, recompute: str) -> Path:
    return out / f"{kind}-{layers}-{recompute}.json"


def _trial(
    arguments: argparse.Namespace, kind: str, layers: int, recompute: str, recompute_layers: int | None = None
) -> dict[str, Any]:
    """What a process of its own found, or `error`."""
    file = _file(arguments.out, kind, layers, recompute)
    file.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--out", str(arguments.out), "--trial", kind, "--layers", str(layers)]
    command += ["--steps", str(arguments.steps), "--rank", str(arguments.rank), "--recompute", recompute]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--recompute-layers", str(recompute_layers)] if recompute_layers else []
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p),
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29613"},
    }
    common: dict[str, Any] = {"kind": kind, "layers": layers, "recompute": recompute}
    common["recompute_layers"] = recompute_layers
    try:
        done = subprocess.run(
            command, env=environment, timeout=arguments.timeout, capture_output=True, text=True, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return common | {"error": f"not finished within {arguments.timeout:.0f} s"}
    if done.returncode or not file.is_file():
        lines = (done.stdout + done.stderr).strip().splitlines()
        reason = next((line for line in reversed(lines) if "OutOfMemoryError" in line), "")
        print(f"{kind}, {layers} layers: failed\n" + "\n".join(lines[-12:]), flush=True)
        return common | {"error": reason[:200] or "\n".join(lines[-12:])}
    result: dict[str, Any] = json.loads(file.read_text())
    print(f"{kind}, {layers} layers, recompute {recompute}: {result.get('summary', '')}", flush=True)
    return common | result


def planned(trial: dict[str, Any], rank: int) -> list[str]:
    """The planner's peak in GiB and seconds of a step, for GPUs that it was calibrated on."""
    from actor_step.cases import Case
    from compare_plan import predict

    from megatron_dppo.models.lora.config import LoraConfig
    from megatron_dppo.planner.gpus import gpu_of_device

    gpu = gpu_of_device(trial["device"], trial["device_bytes"])
    if not gpu.measured:
        return ["", ""]
    case = Case("trial", 1, trial["layers"], recompute=trial["recompute"], recompute_layers=trial["recompute_layers"])
    guess = predict(case, gpu, lora=LoraConfig(rank=rank) if trial["kind"] == "lora" else None)
    return [f"{guess['peak_gib']:.1f}", f"{guess['step_s']:.3f}"]


def report(found: dict[str, Any], rank: int) -> str:
    """Tables in Markdown."""
    lines = [f"Device: {found['agreement'].get('device')}", "", "Agreement with the merged dense model:", ""]
    lines += ["```", json.dumps(found["agreement"], indent=1), "```", ""]
    head = ["kind", "layers", "recompute", "weights 1e9", "trained 1e9", "step s (median)", "tokens/s", "peak GiB"]
    head += ["before the step GiB", "export s", "planned peak GiB", "planned step s"]
    rows = [head, ["---"] * len(head)]
    for trials in (*found["same"].values(), found["most full"], found["most lora"]):
        fine = [t for t in trials if "error" not in t]
        rows += [[t["kind"], t["layers"], t["recompute"], t["error"]] for t in trials if "error" in t]
        if fine:
            first, seconds = fine[0], statistics.median(s for t in fine for s in t["seconds"])
            numbers = [first["parameters"] / 1e9, first["trained"] / 1e9, seconds, first["tokens"] / seconds]
            numbers += [max(t["peak_gib"] for t in fine), first["held_gib"], min(t["export_s"] for t in fine)]
            shown = ["{:.2f}", "{:.3f}", "{:.3f}", "{:,.0f}", "{:.1f}", "{:.1f}", "{:.2f}"]
            texts = [pattern.format(n) for pattern, n in zip(shown, numbers, strict=True)]
            rows.append([first["kind"], first["layers"], first["recompute"], *texts, *planned(first, rank)])
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(exit_status(main))
