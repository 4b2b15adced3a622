"""A divergence that a user could bring."""

from __future__ import annotations

from megatron_dppo.algorithm import Divergence, Needs
from megatron_dppo.algorithm.divergence import topk_tv

EVERY_TOKEN = Divergence(lambda x: topk_tv(*x.topk()), needs=Needs.VOCABULARY, thresholds={"own": 0.1})
