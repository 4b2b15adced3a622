"""The parts of `tools/bench_actor_step.py`."""
