"""Sampling by the C++ kernels, without sorting the vocabulary. `quire.kernels.reference.sampling` specifies it."""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.contract import Draws
from quire.kernels.cpu import _C

# Sampling metadata of one row: struct Wish of csrc/sampling.cpp. begin, end: the row's range in edits and history.
_WISH = np.dtype(
    [
        ("seed", np.uint64),
        ("edits_begin", np.int64),
        ("edits_end", np.int64),
        ("history_begin", np.int64),
        ("history_end", np.int64),
        ("sample_index", np.int32),
        ("position", np.int32),
        ("top_k", np.int32),
        ("mask", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_score", np.float32),
        ("presence", np.float32),
        ("frequency", np.float32),
        ("repetition", np.float32),
    ]
)


def sample(logits: Tensor, draws: Draws) -> Tensor:
    """One token per row of logits (num_rows, vocab_size) -> int64 (num_rows,); -1 if nothing can be sampled."""
    num_rows, vocab_size = logits.shape
    logits = readable(logits)
    wishes = _wishes(draws, num_rows)
    masks = _masks(draws, wishes, vocab_size)
    edit_tokens, edit_values = _edits(draws, wishes, vocab_size)
    history_tokens, are_output = _history(draws, wishes, vocab_size)
    tokens = torch.empty(num_rows, dtype=torch.int64)
    _C.sample(
        logits,
        torch.from_numpy(wishes.view(np.uint8)),
        tokens,
        int(logits.dtype == torch.bfloat16),
        num_rows,
        vocab_size,
        logits.stride(0),
        masks,
        edit_tokens,
        edit_values,
        history_tokens,
        are_output,
    )
    return tokens


def readable(logits: Tensor) -> Tensor:
    """Logits as the kernels read them: float32 or bfloat16, rows contiguous. A copy if they are not."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _wishes(draws: Draws, num_rows: int) -> np.ndarray:
    wishes = np.zeros(num_rows, _WISH)
    wishes["seed"] = draws.seeds
    wishes["sample_index"] = draws.sample_indices
    wishes["position"] = draws.positions
    wishes["top_k"] = draws.top_ks
    wishes["mask"] = -1
    wishes["temperature"] = draws.temperatures
    wishes["top_p"] = draws.top_ps
    wishes["min_score"] = -np.inf
    if draws.min_ps.any():
        wishes["min_score"] = torch.from_numpy(draws.min_ps.copy()).log().numpy()  # rounded as the reference's
    if len(draws.history.rows):
        wishes["presence"] = draws.presence_penalties
        wishes["frequency"] = draws.frequency_penalties
        wishes["repetition"] = draws.repetition_penalties
    return wishes


def _masks(draws: Draws, wishes: np.ndarray, vocab_size: int) -> Tensor | None:
    masks = draws.masks
    if not len(masks.rows):
        return None
    shape = (len(masks.rows), -(-vocab_size // 32))
    if masks.words.shape != shape:
        raise ValueError(f"masks must have shape {shape}, not {masks.words.shape}")
    wishes["mask"][masks.rows] = np.arange(len(masks.rows))
    return _tensor(masks.words, np.uint32)


def _edits(draws: Draws, wishes: np.ndarray, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    edits = draws.edits
    if not len(edits.rows):
        return None, None
    order = _by_row(edits.rows, edits.tokens, vocab_size)
    wishes["edits_begin"], wishes["edits_end"] = _bounds(edits.rows[order], len(wishes))
    return _tensor(edits.tokens[order], np.int64), _tensor(edits.values[order], np.float32)


def _history(draws: Draws, wishes: np.ndarray, vocab_size: int) -> tuple[Tensor | None, Tensor | None]:
    history = draws.history
    if not len(history.rows):
        return None, None
    order = _by_row(history.rows, history.tokens, vocab_size)
    wishes["history_begin"], wishes["history_end"] = _bounds(history.rows[order], len(wishes))
    return _tensor(history.tokens[order], np.int64), _tensor(history.are_output[order], np.bool_)


def _by_row(rows: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray | slice:
    """An index that sorts entries by row and is stable. Raises IndexError for tokens outside of the vocabulary."""
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise IndexError(f"tokens must be in [0, {vocab_size}), not {tokens.min()} to {tokens.max()}")
    return slice(None) if (rows[1:] >= rows[:-1]).all() else np.argsort(rows, kind="stable")


def _bounds(rows: np.ndarray, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Begin and end of the entries of each row. rows: sorted."""
    bounds = np.searchsorted(rows, np.arange(num_rows + 1))
    return bounds[:-1], bounds[1:]


def _tensor(array: np.ndarray, dtype: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.require(array, dtype, ("C", "W")))
