"""Hugging Face configuration to Megatron-Core model, one small file per model family."""
