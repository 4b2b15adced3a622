"""Weights between Hugging Face and Megatron-Core, and training state."""
