"""One node of a training job, see docker/start_node.sh.

this process ──► ray start            (of several nodes; ends with every start of the ranks)
     │
     └─ launch_local ──► ranks        (started again with all nodes' when any of them is lost)
"""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from ipaddress import IPv6Address
from pathlib import Path
from types import FrameType
from typing import IO, Any

import psutil

from megatron_dppo.errors import UserError
from megatron_dppo.launch.folders import require_writable
from megatron_dppo.launch.local import launch_local
from megatron_dppo.launch.meeting import Meeting, NodeLost, Nodes
from megatron_dppo.launch.network import LOOPBACK, address_towards, interface_variables
from megatron_dppo.launch.nodes import PORTS, host_and_port, listed_gpus
from megatron_dppo.launch.rank import PROGRAM, die_with_parent, exit_status
from megatron_dppo.launch.restarts import Restarts, max_restarts
from megatron_dppo.launch.stop import DONE, REQUEST

_ATTEMPTS = 4
"""To start Ray: it gives its daemons 30 s, and its head a few, which a busy machine may need for other things."""
_PAUSE_S = 2.0
"""Between two of them."""
_LATE_S = 60.0
"""What a process that waits for Ray may need beyond its time: to load Ray, and for the call that it is in."""


def main(arguments: Sequence[str]) -> int:
    """The exit status of the job: 0, or STOPPED_STATUS where it was stopped; 1 lost too often; 2 cannot run."""
    environment = os.environ
    nodes = _nodes(environment)
    run = Path(_needed(environment, "RUN_DIR"))
    command = _command(arguments, run)
    processes = _number(environment, "NPROC_PER_NODE", listed_gpus() or 1, least=1)
    several = nodes.count > 1
    if several:
        _needed(environment, "RAY_AUTH_TOKEN")
    ray = RayNode(nodes, run) if several or environment.get("RAY_HEAD") else None
    stopped = _number(environment, "STOPPED_STATUS", 0, below=256)
    restarts = Restarts(run, limit=max_restarts(), goes_on=True, seen_after_s=_number(environment, "SEEN_AFTER_S", 60))
    require_writable(run, named=f"RUN_DIR={run}", make=True)
    meeting = Meeting(nodes, restarts, alive=ray.alive if ray else lambda: None)

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if not meeting.running:  # there is no step to be finished
            sys.exit(stopped)
        print(f"{PROGRAM}: node {nodes.number}: {signal.Signals(number).name}; the running step is finished first",
              file=sys.stderr, flush=True)  # fmt: skip
        (run / REQUEST).touch()

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, ask_to_stop)
    if several:
        os.environ.update(_fabric(nodes))
    status = launch_local(
        command,
        processes=processes,
        meeting=meeting,
        signals="SIGINT,SIGHUP",
        beside=(lambda: ray.running(meeting.num_nodes_waiting)) if ray else nullcontext,
    )
    return stopped if status == 0 and (run / DONE).exists() else status


def _nodes(environment: Mapping[str, str]) -> Nodes:
    count = _number(environment, "NODES", 1, least=1)
    if count == 1:
        return Nodes()
    number = _number(environment, "NODE_RANK")
    if number >= count:
        raise UserError(f"NODE_RANK={number}: of NODES={count} nodes the last is {count - 1}")
    head = _needed(environment, "HEAD_ADDRESS")
    try:
        head.encode("idna")
        if ":" in head:
            IPv6Address(head)
    except ValueError:
        raise UserError(f"HEAD_ADDRESS={head}: is no name or address; name node 0's, without a port") from None
    return Nodes(
        count=count,
        number=number,
        head=head,
        port=_port(environment, "MASTER_PORT", 29500),
        join_timeout_s=_number(environment, "JOIN_TIMEOUT_S", 300),
        lost_after_s=_number(environment, "LOST_AFTER_S", 120),
    )


def _needed(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise UserError(f"{name} is not set; see the top of docker/start_node.sh")
    return environment[name]


def _number(
    environment: Mapping[str, str], name: str, default: int | None = None, *, least: int = 0, below: float = math.inf
) -> int:
    text = environment.get(name) or ("" if default is None else str(default))
    if not text.isdecimal() or not least <= int(text) < below:
        of = "" if below == math.inf else f" below {below}"
        raise UserError(
            f"{name}={text}: must be a whole number{f' from {least}' if least else ''}{of}; see the top of "
            "docker/start_node.sh"
        )
    return int(text)


def _port(environment: Mapping[str, str], name: str, default: int) -> int:
    return _number(environment, name, default, least=1, below=PORTS)


def _command(arguments: Sequence[str], run: Path) -> list[str]:
    """Of one rank: an example's script, or the training that a YAML file describes."""
    if not arguments or not Path(arguments[0]).is_file():
        given = arguments[0] if arguments else "nothing"
        raise UserError(f"start_node.sh: {given} is no file; give examples/run_NAME.sh or a configuration's YAML file")
    program, overrides = arguments[0], arguments[1:]
    if program.endswith(".sh"):
        return [sys.executable, "-u", program, *overrides]
    return [sys.executable, "-u", "-m", "megatron_dppo.cli", "train", program, f"run.dir={run}", *overrides]


def _fabric(nodes: Nodes) -> dict[str, str]:
    """What lets gloo, NCCL and vLLM take the interface that leads to node 0, but for what the environment names. By
    default they ask for the address of the host's name, which on many systems is a loopback address."""
    try:
        own = address_towards(nodes.head, nodes.port)
    except OSError:
        return {}
    found = interface_variables(own) | ({} if own == LOOPBACK else {"VLLM_HOST_IP": own})
    return {name: value for name, value in found.items() if not os.environ.get(name)}


class RayNode:
    """Ray's daemons on this node, of a head that node 0 starts or of the cluster in RAY_HEAD."""

    def __init__(self, nodes: Nodes, run: Path) -> None:
        self._nodes, self._patience = nodes, nodes.join_timeout_s
        self._given = os.environ.get("RAY_HEAD", "")
        own = f"[{nodes.head}]" if ":" in nodes.head else nodes.head  # as Ray writes IPv6
        self._head = self._given or f"{own}:{_port(os.environ, 'RAY_PORT', 6379)}"
        if (place := host_and_port(self._head)) is None:
            raise UserError(f"RAY_HEAD={self._head}: must be host:port of the cluster's head")
        self._place = place
        self._expected = _number(os.environ, "RAY_NODES", nodes.count)
        self._resources = ["--num-gpus", str(_number(os.environ, "RAY_GPUS", listed_gpus()))]
        if os.environ.get("RAY_STORE_BYTES"):
            self._resources += ["--object-store-memory", str(_number(os.environ, "RAY_STORE_BYTES"))]
        self._log = run / f"ray-node-{nodes.number}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._daemons: list[psutil.Process] = []

    @contextmanager
    def running(self, meanwhile: Callable[[], object]) -> Iterator[None]:
        """Inside, all nodes have joined. Raises NodeLost where they did not, and what `meanwhile` does, which is asked
        until they have."""
        os.environ.update(RAY_ADDRESS=self._head, RAY_USAGE_STATS_ENABLED="0")
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15: engines would yield to the ranks that wait for them
        with ExitStack() as stack:
            self._wait_for_head(meanwhile)
            log = stack.enter_context(open(self._log, "ab"))
            attempt, process = 1, self._start(log, stack)
            wait = [sys.executable, "-c", _WAIT, str(self._expected), str(self._patience)]
            # A file: Ray's core says a lot of a head that does not answer, and a full pipe would hold the waiter.
            said = stack.enter_context(tempfile.TemporaryFile("w+", errors="replace"))
            waiter = subprocess.Popen(wait, stderr=said, preexec_fn=die_with_parent)
            stack.callback(_kill, waiter)
            end = time.monotonic() + self._patience + _LATE_S
            while waiter.poll() is None:
                meanwhile()
                if (status := process.poll()) is not None:
                    if attempt == _ATTEMPTS:
                        raise NodeLost(f"Ray ended on node {self._nodes.number} with status {status}, see {self._log}")
                    _end_session(process)  # its daemons would keep the ports
                    time.sleep(_PAUSE_S)
                    attempt, process = attempt + 1, self._start(log, stack)
                if time.monotonic() > end:
                    raise NodeLost(f"Ray did not answer node {self._nodes.number} in time, see {self._log}")
                time.sleep(0.2)
            if waiter.returncode:
                said.seek(0)
                raise NodeLost(f"{said.read().strip().rpartition(chr(10))[2]}; see {self._log}")
            # `ray start` takes it for well-ordered when its raylet leaves because an agent of it was killed.
            started = psutil.Process(process.pid).children()
            self._process, self._daemons = process, [one for one in started if one.name() in ("raylet", "gcs_server")]
            try:
                yield
            finally:
                self._process, self._daemons = None, []

    def alive(self) -> None:
        if self._process is not None and (status := self._process.poll()) is not None:
            raise NodeLost(f"Ray ended on node {self._nodes.number} with status {status}, see {self._log}")
        for daemon in self._daemons:
            with suppress(psutil.NoSuchProcess):
                if daemon.is_running() and daemon.status() != psutil.STATUS_ZOMBIE:
                    continue
            raise NodeLost(f"a daemon of Ray ended on node {self._nodes.number}, see {self._log}")

    @property
    def _is_head(self) -> bool:
        return not self._given and not self._nodes.number

    def _start(self, log: IO[bytes], stack: ExitStack) -> subprocess.Popen[bytes]:
        # A session of its own: Slurm signals the whole process group of a task, and a step needs its engines.
        process = subprocess.Popen(
            [sys.executable, "-c", _RAY, "start", *self._options()],
            stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        stack.callback(_end_session, process)
        return process

    def _options(self) -> list[str]:
        options = ["--block", "--disable-usage-stats", "--num-cpus", "64", *self._resources]
        if own := os.environ.get("VLLM_HOST_IP"):
            options += ["--node-ip-address", own]
        if not self._is_head:
            return [*options, "--address", self._head]
        host, port = self._place
        if "--node-ip-address" not in options:
            options += ["--node-ip-address", host]
        return [*options, "--head", "--port", str(port), "--include-dashboard", "false"]

    def _wait_for_head(self, meanwhile: Callable[[], object]) -> None:
        end = time.monotonic() + self._patience
        while not self._is_head:
            meanwhile()
            with suppress(OSError):
                socket.create_connection(self._place, timeout=5).close()
                return
            if time.monotonic() > end:
                raise NodeLost(f"Ray's head at {self._head} did not answer within {self._patience:.0f} s")
            time.sleep(1.0)


_RAY = "import sys; from ray.scripts.scripts import main; sys.argv[0] = 'ray'; sys.exit(main())"
_WAIT = """
import os, sys, time
import ray
end = time.monotonic() + float(sys.argv[2])
while True:
    try:
        ray.init(address=os.environ["RAY_ADDRESS"], logging_level="ERROR", log_to_driver=False)
        break
    except Exception as error:
        if time.monotonic() > end:
            sys.exit(f"Ray did not come up ({error})")
        time.sleep(2)
while (alive := sum(node["Alive"] for node in ray.nodes())) < int(sys.argv[1]):
    if time.monotonic() > end:
        sys.exit(f"{alive} of {sys.argv[1]} nodes joined Ray")
    time.sleep(1)
"""


def _kill(process: subprocess.Popen[Any]) -> None:
    """A process that has nothing to put in order. One that connects to Ray hears SIGTERM when Ray's core returns."""
    process.kill()
    process.wait()


def _end_session(leader: subprocess.Popen[Any]) -> None:
    """End a process and what is left of the session that it leads."""
    leader.terminate()
    try:
        leader.wait(timeout=30)
    except subprocess.TimeoutExpired:
        _kill(leader)
    if psutil.pid_exists(leader.pid):  # another's: no number is given again while its session has a process
        return
    left = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader.pid:
                process.kill()
                left.append(process)
    psutil.wait_procs(left, timeout=30)


if __name__ == "__main__":  # what job scripts called before `python -m megatron_dppo.launch`: silence is no success
    sys.exit(exit_status(lambda: main(sys.argv[1:])))
