"""A training run that also writes down every batch it trains on: python -m ... sudoku_ranks.py CONFIG FOLDER."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.launch import exit_status
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.trainer.train import train

if __name__ == "__main__":
    kept = EngineFleet.keep

    def keep(self, batch, layer_groups=None):
        folder = Path(sys.argv[2])
        (folder / f"{len(list(folder.glob('*.pickle')))}.pickle").write_bytes(pickle.dumps(batch))
        return kept(self, batch, layer_groups)

    EngineFleet.keep = keep  # type: ignore[method-assign]
    sys.exit(exit_status(lambda: train(load_config(Path(sys.argv[1])))))
