"""A model without an engine: log-probabilities of the tokens of a text, by the kernels that serve it."""

from math import exp

import numpy as np
import torch

from quire.kernels.contract import Batch
from quire.layers.attend import PagedAttend
from quire.layers.context import ForwardContext
from quire.startup.build import Prepared


class TextModel:
    """The model of `prepared`, loaded. Keys and values are stored in blocks, in the type of the KV cache."""

    def __init__(self, prepared: Prepared) -> None:
        self._kernels, device = prepared.kernels.kernels, torch.device(prepared.device)
        self._model = prepared.files.load(
            prepared.dtype, prepared.device, self._kernels, prepared.schemes, lambda done, total: None
        )
        self._block_size = prepared.cache.block_size
        storages = [self._kernels.allocate(group, self._block_size, device) for group in prepared.cache.groups]
        self._num_groups = len(storages)
        self._attend = PagedAttend(self._kernels, storages, self._model.score_scaling)

    @torch.inference_mode()
    def log_probabilities(self, ids: list[int], first: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """Log-probabilities (len(ids) - first, vocab_size) of the tokens from `first` (at least 1) on."""
        tokens = torch.tensor(ids)
        table = np.arange(-(-len(ids) // self._block_size), dtype=np.int64)[None]
        batch = Batch(np.zeros(1, np.int64), np.array([len(ids)]), table)
        self._attend.plan([batch] * self._num_groups)
        context = ForwardContext(self._kernels, self._attend, torch.arange(len(ids)))
        hidden = self._model.forward(tokens, context)
        return self._model.logits(hidden[first - 1 : -1], context).to(dtype).log_softmax(-1)


def negative_logprobs(logprobs: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The negative log-probability of each of the ids, which are as many as `logprobs` has rows."""
    return -logprobs.gather(1, torch.tensor(ids)[:, None])[:, 0]


def perplexity(logprobs: torch.Tensor, ids: list[int]) -> float:
    """The perplexity of the ids, which are as many as `logprobs` has rows."""
    return exp(negative_logprobs(logprobs, ids).double().mean().item())


def divergences(exact: torch.Tensor, found: torch.Tensor) -> torch.Tensor:
    """KL divergence of each row of log-probabilities, float64 (num_rows,)."""
    parts = zip(exact.split(256), found.split(256), strict=True)
    return torch.cat([(p.exp() * (p - q)).sum(-1, dtype=torch.float64) for p, q in parts])
