"""What an answer is worth: verifiers, shaping, and the worker processes that run what may hang."""
