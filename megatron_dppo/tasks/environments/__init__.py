"""Tasks of several turns: the policy acts, an environment answers."""
