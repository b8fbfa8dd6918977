"""Mixture-of-experts layers: routing and products, beside the bound from reading or multiplying active experts.

Where torch has a grouped product, it is measured beside our tiles. Each is better for another number of rows.
"""

from dataclasses import dataclass
from unittest.mock import patch

import torch

from benchmarks.gpu import clock
from benchmarks.gpu.part import Part
from benchmarks.gpu.processes import Settings
from quire.kernels.contract import Routing
from quire.kernels.triton import experts as module
from quire.kernels.triton.kernels import TRITON as kernels

ROWS = (1, 8, 64, 512, 4096)
TINY_ROWS = (1, 33)


@dataclass(frozen=True)
class Mixture:
    """A layer with weights larger than any cache."""

    num_experts: int
    per_token: int
    hidden: int
    inner: int


MIXTURES = {"mixtral-8x7b": Mixture(8, 2, 4096, 14336), "qwen3-30b-a3b": Mixture(128, 8, 2048, 768)}
TINY = {"tiny": Mixture(2, 1, 32, 16)}


def measure(part: Part, settings: Settings) -> None:
    """A row for each mixture and number of tokens."""
    for name, mixture in (TINY if settings.tiny else MIXTURES).items():
        layers: list[Layer] = []
        part.attempt(f"{name}, weights", lambda m=mixture, found=layers: found.append(Layer(m, settings.device)))
        for layer in layers:
            for rows in TINY_ROWS if settings.tiny else ROWS:
                what = f"{name}, {rows} tokens"
                part.attempt(what, lambda w=what, one=layer, r=rows: one.measure(part, w, r))


class Layer:
    """Random weights of a mixture on a device."""

    def __init__(self, mixture: Mixture, device: str) -> None:
        self.mixture = mixture
        self.device = device
        self.up = self._weight(mixture.num_experts, 2 * mixture.inner, mixture.hidden)
        self.down = self._weight(mixture.num_experts, mixture.hidden, mixture.inner)

    def _weight(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(std=shape[-1] ** -0.5)

    def measure(self, part: Part, what: str, rows: int) -> None:
        """Time `rows` tokens with randomly picked experts."""
        mixture = self.mixture
        x = torch.randn(rows, mixture.hidden, device=self.device).to(torch.bfloat16)
        logits = torch.randn(rows, mixture.num_experts, device=self.device).to(torch.bfloat16)

        def compute() -> torch.Tensor:
            ids, weights = kernels.route(logits, mixture.per_token, Routing(normalise=True))
            return kernels.experts(x, ids, weights, self.up, self.down, "silu")

        (seconds,) = clock.seconds([compute], self.device)
        ids, _ = kernels.route(logits, mixture.per_token, Routing(normalise=True))
        one = 3 * mixture.inner * mixture.hidden  # weights of one expert
        num_bytes, flops = 2 * one * len(ids.unique()), 2 * one * ids.numel()
        figures = {
            "us": 1e6 * seconds,
            "gb_per_second": num_bytes / seconds / 1e9,
            "tflops": flops / seconds / 1e12,
        }
        read, multiplied = part.limits.get("read_gb_per_second"), part.limits.get("bf16_tflops")
        if read and multiplied:
            figures["share_of_bound"] = max(num_bytes / read / 1e9, flops / multiplied / 1e12) / seconds
        if ids.numel() > module.SHORT_TILE_ROWS * mixture.num_experts and module.has_grouped_mm(x, self.up):
            with patch.object(module, "has_grouped_mm", lambda x, weight: False):
                (own,) = clock.seconds([compute], self.device)
            figures["own_over_library"] = own / seconds
        part.row(what, **figures)
