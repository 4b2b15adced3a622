"""An engine of transformers' own modules, on any device: slow, exact, for every model that transformers has."""
