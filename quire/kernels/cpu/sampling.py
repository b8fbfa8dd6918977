"""Sampling by the C++ kernels, without sorting the vocabulary. `quire.kernels.reference.sampling` specifies it."""

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu import _C
from quire.kernels.sampling_contract import SamplingMetadata

# Sampling metadata of one row: struct Wish of csrc/sampling.cpp. begin, end: the row's range in edits and history.
_ROW_METADATA = np.dtype(
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


def sample(logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
    """One token per row of logits (num_rows, vocab_size) -> int64 (num_rows,); -1 if nothing can be sampled."""
    num_rows, vocab_size = logits.shape
    logits = kernel_logits(logits)
    row_metadata = _pack_metadata(sampling_metadata, num_rows)
    masks = _masks(sampling_metadata, row_metadata, vocab_size)
    edit_tokens, edit_values = _edits(sampling_metadata, row_metadata, vocab_size)
    history_tokens, are_output = _history(sampling_metadata, row_metadata, vocab_size)
    tokens = torch.from_numpy(np.empty(num_rows, np.int64))
    _C.sample(
        logits,
        torch.from_numpy(row_metadata.view(np.uint8)),
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


def kernel_logits(logits: Tensor) -> Tensor:
    """Logits as the kernels read them: float32 or bfloat16, rows contiguous. A copy if they are not."""
    if logits.dtype not in (torch.float32, torch.bfloat16):
        logits = logits.float()
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _pack_metadata(sampling_metadata: SamplingMetadata, num_rows: int) -> np.ndarray:
    row_metadata = np.zeros(num_rows, _ROW_METADATA)
    row_metadata["seed"] = sampling_metadata.seeds
    row_metadata["sample_index"] = sampling_metadata.sample_indices
    row_metadata["position"] = sampling_metadata.positions
    row_metadata["top_k"] = sampling_metadata.top_ks
    row_metadata["mask"] = -1
    row_metadata["temperature"] = sampling_metadata.temperatures
    row_metadata["top_p"] = sampling_metadata.top_ps
    row_metadata["min_score"] = -np.inf
    if sampling_metadata.min_ps.any():
        row_metadata["min_score"] = (
            torch.from_numpy(sampling_metadata.min_ps.copy()).log().numpy()
        )  # rounded as the reference's
    if len(sampling_metadata.history.rows):
        row_metadata["presence"] = sampling_metadata.presence_penalties
        row_metadata["frequency"] = sampling_metadata.frequency_penalties
        row_metadata["repetition"] = sampling_metadata.repetition_penalties
    return row_metadata


def _masks(sampling_metadata: SamplingMetadata, row_metadata: np.ndarray, vocab_size: int) -> Tensor | None:
    masks = sampling_metadata.masks
    if not len(masks.rows):
        return None
    shape = (len(masks.rows), -(-vocab_size // 32))
    if masks.words.shape != shape:
        raise ValueError(f"masks must have shape {shape}, not {masks.words.shape}")
    row_metadata["mask"][masks.rows] = np.arange(len(masks.rows))
    return _tensor(masks.words, np.uint32)


def _edits(
    sampling_metadata: SamplingMetadata, row_metadata: np.ndarray, vocab_size: int
) -> tuple[Tensor | None, Tensor | None]:
    edits = sampling_metadata.edits
    if not len(edits.rows):
        return None, None
    order = _row_order(edits.rows, edits.tokens, vocab_size)
    row_metadata["edits_begin"], row_metadata["edits_end"] = _bounds(edits.rows[order], len(row_metadata))
    return _tensor(edits.tokens[order], np.int64), _tensor(edits.values[order], np.float32)


def _history(
    sampling_metadata: SamplingMetadata, row_metadata: np.ndarray, vocab_size: int
) -> tuple[Tensor | None, Tensor | None]:
    history = sampling_metadata.history
    if not len(history.rows):
        return None, None
    order = _row_order(history.rows, history.tokens, vocab_size)
    row_metadata["history_begin"], row_metadata["history_end"] = _bounds(history.rows[order], len(row_metadata))
    return _tensor(history.tokens[order], np.int64), _tensor(history.are_output[order], np.bool_)


def _row_order(rows: np.ndarray, tokens: np.ndarray, vocab_size: int) -> np.ndarray | slice:
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
