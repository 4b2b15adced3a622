"""A training run that writes down every batch, and whose last engine is killed inside a turn of its second step:
agent_ranks.py CONFIG FOLDER."""

from __future__ import annotations

import pickle
import sys
import threading
from pathlib import Path

from megatron_dppo.config.load import load_config
from megatron_dppo.launch import exit_status
from megatron_dppo.rollout.fleet.fleet import EngineFleet
from megatron_dppo.trainer.train import train
from tests.trainer.fleet_ranks import disturb

if __name__ == "__main__":
    kept = EngineFleet.keep
    folder = Path(sys.argv[2])

    def keep(self, batch, layer_groups=None):
        number = len(list(folder.glob("*.pickle")))
        (folder / f"{number}.pickle").write_bytes(pickle.dumps(batch))
        if number == 0:  # the next work is that of the second step
            threading.Thread(target=disturb, args=(self, "kill", len(self.members) - 1), daemon=True).start()
        return kept(self, batch, layer_groups)

    EngineFleet.keep = keep  # type: ignore[method-assign]
    sys.exit(exit_status(lambda: train(load_config(Path(sys.argv[1])))))
