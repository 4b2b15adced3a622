"""An engine of transformers' own modules, on any device: plain, for every causal language model that
transformers has."""
