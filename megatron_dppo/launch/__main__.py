"""`python -m megatron_dppo.launch PROGRAM [a.b=c ...]`: one node of a training job, see docker/start_node.sh."""

from __future__ import annotations

import sys

from megatron_dppo.launch.rank import exit_status


def run() -> int:
    from megatron_dppo.launch.node import main  # with torch: seconds, in which a signal ends this in one line as well

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(exit_status(run))
