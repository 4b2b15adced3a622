"""Importable from the repository's root, so that scripts and tools share what the examples are made of."""
