"""Import and export stay within a shard and a bucket, however large the checkpoint."""

from pathlib import Path

import pytest

from tests.checkpoint.memory_ranks import import_and_export, write_large_model
from tests.distributed import run_ranks

MIB = 2**20


@pytest.mark.parametrize("gigabytes", [0.5, pytest.param(2.0, marks=pytest.mark.full)], ids=["half a GiB", "two GiB"])
@pytest.mark.parametrize(
    "layout", [{"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}, {"expert": 2}], ids=str
)
def test_peaks_on_two_ranks(gigabytes: float, layout: dict[str, object], tmp_path: Path) -> None:
    size = write_large_model(tmp_path / "model", gigabytes)
    found = run_ranks(import_and_export, 2, tmp_path / "model", tmp_path / "out", layout, timeout=400)
    for rank, (shard, importing, exporting) in enumerate(found):
        print(f"{size / MIB:.0f} MiB, rank {rank}: shard {shard / MIB:.0f}, import {importing / MIB:.0f}, "
              f"export {exporting / MIB:.0f} MiB")  # fmt: skip
        assert importing < shard + 350 * MIB
        assert exporting < 600 * MIB
    assert sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors")) > size
