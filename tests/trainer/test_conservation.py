"""What a step refuses to train on."""

from __future__ import annotations

import pytest

from megatron_dppo.trainer.rollouts import _groups_that_came

ASKED = [f"{group}/{sample}" for group in range(4) for sample in range(2)]


def test_whole_groups_in_order_are_taken() -> None:
    assert _groups_that_came(ASKED, ASKED, 2, 4) == [0, 1, 2, 3]
    assert _groups_that_came(ASKED, [*ASKED[:2], *ASKED[4:6]], 2, 2) == [0, 2]


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ([*ASKED, "9/0"], "1 answers came that nobody asked for, first 9/0"),
        ([*ASKED[:6], *ASKED[:2]], r"8 came, 6 of them different"),
        (ASKED[:7], "7 came, 7 of them different"),
        (ASKED[:6], "not 4 whole groups"),
        ([ASKED[1], ASKED[0], *ASKED[2:]], "in the order asked for"),
        ([*ASKED[2:4], *ASKED[:2], *ASKED[4:]], "in the order asked for"),
        ([ASKED[0], ASKED[2], *ASKED[4:], ASKED[1], ASKED[3]], "whole groups"),
    ],
)
def test_lost_doubled_torn_and_foreign_answers_fail_the_step(came: list[str], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        _groups_that_came(ASKED, came, 2, 4)
