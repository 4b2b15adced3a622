"""Conversations of agents that keep every token: sessions between a harness, which speaks HTTP and text, and engines,
which speak token ids."""
