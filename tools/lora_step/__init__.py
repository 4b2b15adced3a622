"""The parts of `tools/bench_lora.py`."""
