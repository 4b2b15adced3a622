"""Which parts of the benchmark of a machine run."""

from __future__ import annotations

from pathlib import Path

from tools.bench_cluster import chosen, parts


def test_a_part_that_lacks_its_model_brings_who_makes_it(tmp_path: Path) -> None:
    every = parts(1, tmp_path, tiny=False)
    assert chosen(every, ()) == every
    assert [part.name for part in chosen(every, ["leak"])] == ["leak"]
    first, fp8 = chosen(every, ["fp8-0"])
    assert (first.name, fp8.name) == ("learner", "fp8-0")
    made = Path(fp8.environment["MODEL_DIR"])
    assert str(made) in first.command
    made.mkdir(parents=True)
    assert chosen(every, ["fp8-0"]) == [fp8]
