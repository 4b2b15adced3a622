"""Starting ranks, and ending them all with one clear line when something goes wrong."""

from megatron_dppo.launch.example import Downloaded, MadeOnce, job_stamp, run_example, run_experiment
from megatron_dppo.launch.local import launch_local
from megatron_dppo.launch.rank import exit_status

__all__ = ["Downloaded", "MadeOnce", "exit_status", "job_stamp", "launch_local", "run_example", "run_experiment"]
