"""Prompts, rewards and environments: what a policy is trained on."""
