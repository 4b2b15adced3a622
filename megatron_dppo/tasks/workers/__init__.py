"""Processes for what may hang, crash, leak or turn against the run: rewards, and environments."""
