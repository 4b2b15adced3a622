"""The training program: loop, evaluation, metrics, what a person sees."""
