"""Hypothesis without a deadline: these machines are shared, and a slow example is not a wrong one."""

from hypothesis import settings

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
