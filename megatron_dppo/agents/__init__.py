"""Conversations of agents that keep every token: sessions between a harness, which speaks HTTP and text, and engines,
which speak token ids."""

MODEL = "policy"
"""What harnesses call the model; other names do as well."""
