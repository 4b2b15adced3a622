"""Prompts, rewards and environments."""
