"""Prompts from files and Hugging Face datasets: rows, layouts, examples."""
