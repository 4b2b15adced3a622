"""megatron_dppo: reinforcement learning of mixture-of-experts language models with DPPO on Megatron-Core."""

__version__ = "0.1.0"
