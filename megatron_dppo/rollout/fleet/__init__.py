"""Several engines used as one, in Ray actors: who gets which work, and what becomes of engines that fail."""
