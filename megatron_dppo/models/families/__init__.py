"""One file per model family; each defines `FAMILY`. `decoder.py` has what they share."""
