"""Import and export stay within a shard and a bucket, however large the checkpoint."""

from pathlib import Path

import pytest

from tests.checkpoint.memory_ranks import import_and_export, megatron_lm, write_large_model
from tests.distributed import run_ranks

MIB = 2**20


TP2_ETP2 = {"tensor": 2, "sequence_parallel": True, "expert_tensor": 2}
EP2 = {"expert": 2}


@pytest.mark.parametrize(
    ("gigabytes", "layout"),
    [
        (0.5, TP2_ETP2),
        pytest.param(2.0, TP2_ETP2, marks=pytest.mark.full),
        pytest.param(2.0, EP2, marks=pytest.mark.full),
    ],
    ids=["half a GiB, TP2 x ETP2", "two GiB, TP2 x ETP2", "two GiB, EP2"],
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


@pytest.mark.parametrize("gigabytes", [0.25, pytest.param(2.0, marks=pytest.mark.full)])
def test_a_folder_of_megatron_lm_is_written_and_read_beside_one_copy_of_the_model(
    gigabytes: float, tmp_path: Path
) -> None:
    size = write_large_model(tmp_path / "model", gigabytes)
    found = run_ranks(megatron_lm, 2, tmp_path / "model", tmp_path / "out", EP2, timeout=400)
    for rank, (shard, writing, reading) in enumerate(found):
        print(f"{size / MIB:.0f} MiB, rank {rank}: shard {shard / MIB:.0f}, writing {writing / MIB:.0f}, "
              f"reading {reading / MIB:.0f} MiB")  # fmt: skip
        assert writing < 32 * MIB
        assert reading < 350 * MIB
