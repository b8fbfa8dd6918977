"""The data types of `sample` of a kernel module: `contract.Kernels` has the function."""

from dataclasses import dataclass

import msgspec
import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Sampling masks. Each row of logits has at most one."""

    rows: np.ndarray  # int64
    words: np.ndarray  # uint32 (len(rows), words): bit t%32 of word t//32 allows token t


@dataclass(frozen=True, slots=True, eq=False)
class LogitEdits:
    """Logit edits: values that are added to single logits. Several values for one logit add up."""

    rows: np.ndarray  # int64
    tokens: np.ndarray  # int64
    values: np.ndarray  # float32, finite or -inf


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Token occurrences of sequences with penalties: one entry per occurrence."""

    rows: np.ndarray  # int64
    tokens: np.ndarray  # int64
    are_output: np.ndarray  # bool: True for output tokens, False for prompt tokens


class SamplingMetadata(msgspec.Struct, frozen=True, eq=False):
    """Sampling metadata: host arrays with one entry per row of logits."""

    seeds: np.ndarray  # uint64
    sample_indices: np.ndarray  # int32, index among the n sequences of a request
    positions: np.ndarray  # int32, position of the sampled token in its sequence
    temperatures: np.ndarray  # float32, 0 is greedy
    top_ps: np.ndarray  # float32 in (0, 1], 1 keeps all
    top_ks: np.ndarray  # int32, 0 or less keeps all
    min_ps: np.ndarray  # float32 in [0, 1], 0 keeps all
    presence_penalties: np.ndarray  # float32, 0 is none
    frequency_penalties: np.ndarray  # float32, 0 is none
    repetition_penalties: np.ndarray  # float32 above 0, 1 is none
    masks: Masks
    edits: LogitEdits
    history: History  # of rows with a penalty; without a repetition penalty, prompt tokens are left out
