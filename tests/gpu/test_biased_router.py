"""A router's bias on a GPU, where TransformerEngine multiplies."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_biased_router import DTYPES, check_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and TransformerEngine"),
]


@pytest.mark.parametrize(("dtype", "of_logits"), DTYPES)
def test_each_logit_has_its_own_bias(dtype: str | None, of_logits: torch.dtype) -> None:
    """The stock router's logits have the biases of other experts, and what lies behind them in memory."""
    check_logits("cuda", dtype, of_logits)
