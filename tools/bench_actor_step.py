"""Step time, utilisation, memory and agreement of the Megatron actor on the GPUs of one machine.

    python tools/bench_actor_step.py --out results                 # every case, concurrently where GPUs are free
    python tools/bench_actor_step.py --out results --only a1 b2    # some
    python tools/bench_actor_step.py --out results --tiny          # every code path on a CPU, a tiny model

Qwen3-30B-A3B's shapes with fewer layers and random weights, packs of 16,384 tokens with random routes; no files, no
network. Each case is a torchrun job of its own: one that fails or hangs does not stop the others. Writes bench.json,
bench.md, bench.log and one Chrome trace.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from actor_step.cases import CASES, Case

from megatron_dppo.launch import exit_status
from megatron_dppo.launch.arguments import out_folder, real, require_gpu


@dataclass
class Job:
    """A case that runs."""

    case: Case
    gpus: list[int]
    process: subprocess.Popen[bytes]
    log: Path
    deadline: float


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=out_folder, required=True, help="folder of the results; made when absent")
    parser.add_argument(
        "--only",
        nargs="*",
        choices=[c.name for c in CASES],
        metavar="CASE",
        help=f"of {', '.join(c.name for c in CASES)}",
    )
    parser.add_argument("--tiny", action="store_true", help="tiny model and sequences, for a CPU")
    parser.add_argument("--seconds", type=real(), default=6.0, help="time to spend on each group of arms")
    parser.add_argument("--timeout", type=real(), default=150.0, help="seconds after which a case is ended")
    parser.add_argument("--total", type=real(), default=480.0, help="seconds after which no case starts")
    parser.add_argument("--no-wgrad-fusion", action="store_true", help="weight gradients added up after the product")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        from actor_step.worker import work

        case = next(c for c in CASES if c.name == arguments.case)
        fusion = not arguments.no_wgrad_fusion
        return work(
            case, arguments.out / f"{case.name}.json", tiny=arguments.tiny, seconds=arguments.seconds, fusion=fusion
        )
    require_gpu(parser, tiny=arguments.tiny)
    return drive(arguments)


def drive(arguments: argparse.Namespace) -> int:
    """Run the cases on the GPUs there are, the first that fits first, and write the report."""
    from torch.cuda import device_count

    free = list(range(4 if arguments.tiny else device_count()))
    waiting = [c for c in CASES if not arguments.only or c.name in arguments.only]
    too_large = [c.name for c in waiting if c.gpus > len(free)]
    waiting = [c for c in waiting if c.gpus <= len(free)]
    folder = Path(tempfile.mkdtemp())
    start, running, failures = time.monotonic(), [], dict.fromkeys(too_large, "needs more GPUs than there are")
    at_once = 1 if arguments.tiny else len(free)
    while waiting or running:
        for case in [c for c in waiting if len(running) < at_once]:
            if time.monotonic() - start > arguments.total:
                failures[case.name] = "not started: no time left"
                waiting.remove(case)
            elif case.gpus <= len(free) and len(running) < at_once:
                waiting.remove(case)
                running.append(_launch(case, [free.pop(0) for _ in range(case.gpus)], folder, arguments))
        time.sleep(0.1)
        for job in list(running):
            code = job.process.poll()
            if code is None and time.monotonic() < job.deadline:
                continue
            if code is None:
                os.killpg(job.process.pid, signal.SIGKILL)
                job.process.wait()
            if code != 0:
                failures[job.case.name] = f"{'timed out' if code is None else f'exit status {code}'}\n{_tail(job.log)}"
            running.remove(job)
            free = sorted(free + job.gpus)
            print(f"[{time.monotonic() - start:5.0f} s] {job.case.name}: {'ok' if code == 0 else 'FAILED'}", flush=True)
            # Now, so that whoever ends this program has what was measured.
            text = _write_report(arguments.out, folder, failures, {other.case.name for other in running})
            if not waiting and not running:
                print(text, flush=True)
    shutil.rmtree(folder)
    return 1 if failures else 0


def _launch(case: Case, gpus: list[int], folder: Path, arguments: argparse.Namespace) -> Job:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={case.gpus}"]
    command += ["--master-addr=127.0.0.1", f"--master-port={port}", __file__, "--case", case.name]
    command += ["--out", str(folder), "--seconds", str(arguments.seconds)]
    command += ["--tiny"] if arguments.tiny else []
    command += ["--no-wgrad-fusion"] if arguments.no_wgrad_fusion else []
    root = str(Path(__file__).resolve().parent.parent)
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": ",".join(_visible(gpu) for gpu in gpus),
        "PYTHONPATH": os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH")) if p),
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        "OMP_NUM_THREADS": "1" if arguments.tiny else "8",
    }
    log = folder / f"{case.name}.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
    return Job(case, gpus, process, log, time.monotonic() + arguments.timeout)


def _visible(gpu: int) -> str:
    """The name of this process's GPU number `gpu`, which may see some of the machine's alone."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[gpu] if gpu < len(names) else str(gpu)


def _write_report(out: Path, folder: Path, failures: dict[str, str], running: set[str]) -> str:
    """The report of the cases in `folder` but those that still run, with all logs and traces."""
    from actor_step.report import report

    files = [file for file in sorted(folder.glob("*.json")) if file.stem not in running]
    found = {file.stem: json.loads(file.read_text()) for file in files}
    text = report(found, failures)
    (out / "bench.json").write_text(json.dumps({"cases": found, "failures": failures}, indent=1))
    (out / "bench.md").write_text(text)
    (out / "bench.log").write_bytes(
        b"\n".join(b"== " + log.stem.encode() + b"\n" + log.read_bytes() for log in sorted(folder.glob("*.log")))
    )
    for trace in folder.glob("*.trace.json.gz"):
        shutil.copy(trace, out / trace.name)
    return text


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    # What the rank said is more than what torchrun says about it.
    own = [i for i, line in enumerate(lines) if "torch/distributed/elastic" in line or "ChildFailedError" in line]
    return "\n".join(lines[: own[0]][-25:] if own and own[0] > 3 else lines[-25:])


if __name__ == "__main__":
    sys.exit(exit_status(main))
