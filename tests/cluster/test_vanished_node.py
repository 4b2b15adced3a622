"""A node of which nothing is heard again, on two machines of their own (`two_nodes.py`), without Ray and a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.two_nodes import two_nodes, why_not
from tests.distributed import PATIENCE_S

STEPS, LOST_AFTER_S = 8, 5
START = 'export GLOO_SOCKET_IFNAME=lan; exec "$PYTHON" /mnt/node.py "$@"'
NODE = """
import os, sys
from pathlib import Path
from megatron_dppo.launch import exit_status, launch_local
from megatron_dppo.launch.meeting import Meeting, Nodes
from megatron_dppo.launch.restarts import Restarts
number, program, steps, lost_after_s = int(os.environ["NODE_RANK"]), *sys.argv[1:]
nodes = Nodes(2, number, os.environ["HEAD_ADDRESS"], 29500, join_timeout_s=120, lost_after_s=int(lost_after_s))
meeting = Meeting(nodes, Restarts(Path(os.environ["RUN_DIR"]), limit=3, goes_on=True, seen_after_s=5))
sys.exit(exit_status(lambda: launch_local([sys.executable, program, steps], processes=1, meeting=meeting)))
"""
RANK = """
import json, os, pathlib, sys, time
from megatron_dppo.launch import exit_status

def run():
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    folder, rank, sums = pathlib.Path(os.environ["RUN_DIR"]), dist.get_rank(), [0.0]
    if states := sorted(folder.glob("checkpoints/step_*/state.json")) if "trainer.resume=true" in sys.argv else []:
        sums = json.loads(states[-1].read_text())
    for step in range(len(sums), int(sys.argv[1]) + 1):
        while step == 4 and not (folder / "vanished").exists():
            time.sleep(0.05)
        value = torch.tensor([sums[-1] + step * (rank + 1)])
        work = dist.all_reduce(value, async_op=True)
        while not work.is_completed():
            time.sleep(0.01)
        sums.append(value.item())
        if rank == 0:
            state = folder / f"checkpoints/step_{step:08d}/state.json"
            state.parent.mkdir(parents=True, exist_ok=True)
            state.with_suffix(".new").write_text(json.dumps(sums))
            state.with_suffix(".new").rename(state)

sys.exit(exit_status(run))
"""


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.full)])
def test_the_other_node_waits_for_one_that_takes_its_place(node: int, tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "run").mkdir()
    for name, text in {"node.py": NODE, "rank.py": RANK, "start.sh": START}.items():
        (tmp_path / name).write_text(text)
    start = {"START": "/mnt/start.sh", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    with two_nodes(tmp_path, "/mnt/rank.py", str(STEPS), str(LOST_AFTER_S), **start) as nodes:
        for each in (0, 1):
            nodes.start(each)
        nodes.wait_for_step(2, PATIENCE_S)
        nodes.vanish(node)
        trained = len(list((tmp_path / "run/checkpoints").iterdir()))
        (tmp_path / "run/vanished").touch()
        nodes.start(node)
        assert nodes.wait(PATIENCE_S) == [0, 0], [nodes.log(each).read_text()[-3000:] for each in (0, 1)]
        assert trained < STEPS
        if node == 1:  # a new node 0 counts from the beginning
            assert nodes.restarts() == [f"megatron-dppo: failed: node 1 gave no sign of life for {LOST_AFTER_S} s"]
    sums = [0.0]
    for step in range(1, STEPS + 1):
        sums.append(2 * sums[-1] + 3 * step)
    assert json.loads((tmp_path / f"run/checkpoints/step_{STEPS:08d}/state.json").read_text()) == sums
