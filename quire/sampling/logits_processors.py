"""Logits processors of offline requests: Python functions that change the logits before a token is sampled."""

import inspect
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.core.runner import LogitsProcessor, RowProcessors


def apply_processors(logits: Tensor, rows: np.ndarray, asking: Sequence[RowProcessors]) -> Tensor:
    """A copy of logits (num_samples, vocab_size) in float32, with the rows that have processors changed by them.

    rows (num_samples,): the row of each sample. Raises TypeError for a processor that returns no such logits, and what
    a processor raises.
    """
    changed = logits.to(torch.float32, copy=True)
    places = {row: place for place, row in enumerate(rows.tolist())}
    for one in asking:
        place = places[one.row]
        for processor in one.processors:
            changed[place] = _applied(processor, one, changed[place])
    return changed


def _applied(processor: LogitsProcessor, asking: RowProcessors, logits: Tensor) -> Tensor:
    takes_prompt = len(inspect.signature(processor).parameters) == 3
    found = processor(*([list(asking.prompt)] if takes_prompt else []), list(asking.output), logits)
    if not isinstance(found, Tensor) or found.shape != logits.shape:
        returned = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"a logits processor must return logits of shape {tuple(logits.shape)}, not {returned}")
    return found
