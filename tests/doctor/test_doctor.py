"""Every fault is really there: files, environments, limits and mounts, never a patched check."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from examples.tiny_moe_dppo.model import byte_tokenizer, random_tiny_qwen3_moe, write_checkpoint
from megatron_dppo.cli import main
from megatron_dppo.doctor.configuration import check_configuration
from tests.system_faults import failing

type Tree = dict[str, dict]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_tokenizer()
    write_checkpoint(folder, random_tiny_qwen3_moe(tokenizer, seed=1), tokenizer)
    return folder


def healthy(folder: Path, model: Path) -> Tree:
    return {
        "run": {"dir": str(folder / "runs/mine"), "name": "mine"},
        "model": {"path": str(model)},
        "parallel": {"tensor": 2, "expert": 2, "sequence_parallel": True},
        "actor": {"dtype": "float32", "max_tokens_per_microbatch": 512},
        "rollout": {"max_prompt_tokens": 32, "max_response_tokens": 8, "object_store_mib": 80},
        "task": {
            "train_size": 64,
            "held_out_size": 16,
            "prompt": "{metadata[expression]}",
            "parameters": {"max_terms": 3, "max_digits": 2},
        },
        "evaluation": {"prompts": 16},
        "trainer": {"prompts_per_step": 8, "samples_per_prompt": 4, "prompts_per_mini_batch": 4},
    }


def examine(folder: Path, tree: Tree, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    status = main(["doctor", *options, str(file)])
    sandbox, *lines = capsys.readouterr().out.splitlines()
    assert sandbox.startswith("ok: sandbox: ")
    return status, lines


def test_a_healthy_configuration_is_answered_by_silence(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = examine(tmp_path, healthy(tmp_path, checkpoint), capsys, "--ranks", "4", "--strict")
    on_a_gpu = ["ok: memory: not checked: the planner knows actor.dtype=bfloat16 and float16, not float32"]
    assert (status, lines) == (0, on_a_gpu if torch.cuda.is_available() else [])
    assert not (tmp_path / "runs").exists(), "the doctor leaves nothing behind"


def test_random_weights_need_no_files(tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copied = tmp_path / "model"
    shutil.copytree(checkpoint, copied, ignore=shutil.ignore_patterns("*.safetensors"))
    tree = healthy(tmp_path, copied)
    status, lines = examine(tmp_path, tree, capsys, "--ranks", "4")
    assert status == 1
    assert "has no weights" in lines[0]
    tree["model"]["random_weights"] = True
    assert examine(tmp_path, tree, capsys, "--ranks", "4", "--strict") == (0, [])


def unknown_key(folder: Path, tree: Tree) -> None:
    tree["trainer"]["stepz"] = 3


def no_model_config(folder: Path, tree: Tree) -> None:
    (Path(tree["model"]["path"]) / "config.json").unlink()


def truncated_weights(folder: Path, tree: Tree) -> None:
    file = next(Path(tree["model"]["path"]).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:5000])


def no_tokenizer(folder: Path, tree: Tree) -> None:
    for file in Path(tree["model"]["path"]).glob("token*"):
        file.unlink()


def experts_do_not_divide(folder: Path, tree: Tree) -> None:
    tree["parallel"] = {"expert": 3}


def tensor_without_sequence(folder: Path, tree: Tree) -> None:
    tree["parallel"] = {"tensor": 2, "expert": 2}


def fewer_sequences_than_ranks(folder: Path, tree: Tree) -> None:
    tree["trainer"] = {"prompts_per_step": 1, "samples_per_prompt": 1, "prompts_per_mini_batch": 1}


def one_answer_each(folder: Path, tree: Tree) -> None:
    tree["trainer"]["samples_per_prompt"] = 1


def long_answers(folder: Path, tree: Tree) -> None:
    tree["rollout"]["max_response_tokens"] = 500


def longer_than_the_model(folder: Path, tree: Tree) -> None:
    config = json.loads((Path(tree["model"]["path"]) / "config.json").read_text())
    tree["actor"]["max_tokens_per_microbatch"] = 2 * config["max_position_embeddings"]
    tree["rollout"]["max_response_tokens"] = config["max_position_embeddings"]


def replay_without_record(folder: Path, tree: Tree) -> None:
    tree["rollout"]["router_replay"] = False


def other_topk(folder: Path, tree: Tree) -> None:
    tree["algorithm"] = {"preset": "dppo-topk-tv"}
    tree["rollout"]["top_k_logprobs"] = 7


def nothing_to_resume(folder: Path, tree: Tree) -> None:
    tree["trainer"]["resume"] = True


def unknown_change(folder: Path, tree: Tree) -> None:
    tree["trainer"]["resume_changed"] = ["optimizer.lrr"]


def lost_checkpoint(folder: Path, tree: Tree) -> None:
    root = Path(tree["run"]["dir"]) / "checkpoints"
    root.mkdir(parents=True)
    (root / "latest").write_text("step_00000007")
    tree["trainer"]["resume"] = True


def used_folder(folder: Path, tree: Tree) -> None:
    run = Path(tree["run"]["dir"])
    run.mkdir(parents=True)
    (run / "metrics.jsonl").write_text('{"step": 1}\n')


def file_in_the_way(folder: Path, tree: Tree) -> None:
    (folder / "runs").write_text("a file")


def secret_in_clear(folder: Path, tree: Tree) -> None:
    tree["run"]["name"] = "hf_abcdefghijklmnopqrstuvwxyz"


def impatient_ranks(folder: Path, tree: Tree) -> None:
    tree["run"]["collective_timeout_minutes"] = 1.0


def unknown_dataset(folder: Path, tree: Tree) -> None:
    tree["task"]["dataset"] = "no_such_dataset"


def prompts_too_long(folder: Path, tree: Tree) -> None:
    tree["task"]["parameters"] = {"min_terms": 6, "max_terms": 6}


def too_few_held_out(folder: Path, tree: Tree) -> None:
    tree["evaluation"]["prompts"] = 17


def no_tracking_service(folder: Path, tree: Tree) -> None:
    if find_spec("trackio"):
        pytest.skip("trackio is installed")
    tree["tracking"] = {"trackio": True}


def no_evaluation_file(folder: Path, tree: Tree) -> None:
    tree["evaluation"]["sets"] = [{"name": "aime24", "data": {"path": str(folder / "aime24.jsonl")}}]


def no_reward_file(folder: Path, tree: Tree) -> None:
    tree["task"]["rewards"] = [{"kind": "python", "path": str(folder / "absent.py:score")}]


def no_reward_function(folder: Path, tree: Tree) -> None:
    (folder / "own.py").write_text("def score(**_):\n    return 1.0\n")
    tree["task"]["rewards"] = [{"kind": "python", "path": str(folder / "own.py:scor")}]


FAULTS: list[tuple[Callable[[Path, Tree], None], str]] = [
    (unknown_key, "error: config: unknown config key trainer.stepz; did you mean trainer.steps?"),
    (no_model_config, "has no config.json"),
    (truncated_weights, "is no intact safetensors file"),
    (no_tokenizer, "error: tokenizer: "),
    (experts_do_not_divide, "cannot be divided among expert = 3"),
    (tensor_without_sequence, "needs sequence_parallel: true"),
    (fewer_sequences_than_ranks, "1 sequences for 2 data-parallel ranks"),
    (one_answer_each, "every advantage would be 0"),
    (long_answers, "actor.max_tokens_per_microbatch=512: the first that long would stop the run; set it to 532"),
    (longer_than_the_model, "lower rollout.max_response_tokens"),
    (replay_without_record, "actor.router_replay=r3 needs the routes that rollout.router_replay=false"),
    (other_topk, "rollout.top_k_logprobs=7"),
    (nothing_to_resume, "error: resume: cannot resume"),
    (unknown_change, "error: resume: trainer.resume_changed: optimizer.lrr is no setting"),
    (lost_checkpoint, "names 'step_00000007'"),
    (used_folder, "already holds the metrics of a run"),
    (file_in_the_way, "runs: Not a directory"),
    (secret_in_clear, "holds what looks like a secret"),
    (impatient_ranks, "ranks give up after 1 min"),
    (unknown_dataset, "no_such_dataset"),
    (prompts_too_long, "of 80 prompts are longer than rollout.max_prompt_tokens=32"),
    (too_few_held_out, "evaluation.prompts=17, but task.held_out_size=16"),
    (no_tracking_service, "error: tracking: tracking.trackio=true, but trackio cannot be imported"),
    (no_reward_file, "absent.py:score cannot be imported: FileNotFoundError"),
    (no_reward_function, "own.py has no callable scor"),
    (no_evaluation_file, "aime24.jsonl: no such file or folder"),
]


@pytest.mark.parametrize(("plant", "message"), FAULTS, ids=[plant.__name__ for plant, _ in FAULTS])
def test_a_fault_of_the_configuration_is_found(
    plant: Callable[[Path, Tree], None],
    message: str,
    tmp_path: Path,
    checkpoint: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copied = tmp_path / "model"
    shutil.copytree(checkpoint, copied)
    tree = healthy(tmp_path, copied)
    plant(tmp_path, tree)
    ranks = "6" if plant is experts_do_not_divide else "4"
    status, lines = examine(tmp_path, tree, capsys, "--ranks", ranks)
    assert status == 1
    assert any(message in line for line in lines), lines
    assert all(line.startswith(("error: ", "warning: ")) and "; " in line for line in lines)


def test_a_world_that_the_layout_does_not_divide(
    tmp_path: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, lines = examine(tmp_path, healthy(tmp_path, checkpoint), capsys, "--ranks", "3")
    assert status == 1
    assert any(line.startswith("error: layout: parallel: world size 3 is not a multiple") for line in lines)


def in_a_mount(mount: str, *commands: list[str]) -> list[str]:
    """What the doctor says to each command line, in a mount namespace of its own, where `mount` was run."""
    run = f"for one in {list(commands)}:\n    print(f'status {{main([\"doctor\", *one])}}|')"
    command = shlex.join([sys.executable, "-c", f"from megatron_dppo.cli import main\n{run}"])
    try:
        probe = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no unshare command")
    if probe.returncode:
        pytest.skip(f"mount namespaces are not allowed here: {probe.stderr.strip()}")
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", f"{mount} && {command}"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    *outs, rest = done.stdout.split("|\n")
    assert (len(outs), rest) == (len(commands), ""), done.stderr
    return outs


def test_small_shared_memory_is_found() -> None:
    (out,) = in_a_mount("mount -t tmpfs -o size=16m none /dev/shm", [])
    assert "error: shared-memory: /dev/shm has 16 MiB free of 256 wanted" in out
    assert out.endswith("status 1")


def test_a_disk_without_room_is_found(tmp_path: Path, checkpoint: Path) -> None:
    tree = healthy(tmp_path, checkpoint)
    tree["trainer"]["checkpoint_every"] = 2
    small = tmp_path / "small"
    small.mkdir()
    tree["run"]["dir"] = str(small / "mine")
    adapters = tree | {"trainer": tree["trainer"] | {"export_hugging_face": False}}
    adapters["lora"] = {"rank": 1, "targets": ["o"]}  # states then have adapters alone
    files = [tmp_path / name for name in ("whole.yaml", "adapters.yaml")]
    for file, one in zip(files, (tree, adapters), strict=True):
        file.write_text(yaml.safe_dump(one))
    whole, little = in_a_mount(
        f"mount -t tmpfs -o size=4m none {small}", *([str(file), "--ranks", "4"] for file in files)
    )
    assert f"error: disk: {small} has 4 MiB free" in whole
    assert whole.endswith("status 1")
    assert "error: " not in little
    assert little.endswith("status 0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0: must be 1 or more"),
        (["--ranks", "8"], "--ranks: name a configuration as well"),
        (["--bandwidth"], "start it with torchrun"),
        (["--min-bandwidth", "5"], "--min-bandwidth 5: must be GB/s above 0, beside --bandwidth"),
        (["--bandwidth", "--min-bandwidth", "nan"], "--min-bandwidth nan: must be GB/s above 0"),
        (["--parity", "MODEL", "--gpu", "--ranks", "8"], "--ranks, --gpu: not for --parity"),
        (["--parity", "MODEL", "--min-bandwidth", "0"], "--min-bandwidth: not for --parity"),
        (["--layers", "0"], "--layers belong to --parity MODEL"),
    ],
)
def test_bad_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_file_that_may_not_be_read_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.yaml").write_text("run: {}\n")
    monkeypatch.setattr("io.open", failing(errno.EACCES))
    (found,) = check_configuration(tmp_path / "run.yaml", [], ranks=1)
    assert "run.yaml cannot be read: Permission denied" in found.problem
