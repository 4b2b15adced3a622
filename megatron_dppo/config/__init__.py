"""Typed, frozen configuration: YAML files plus `a.b=c` overrides."""
