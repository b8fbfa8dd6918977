"""The contract of kernel modules: the functions each one has, and the data they are given.

A kernel module owns the layout of blocks on its device and knows nothing about models, requests or
schedules. `quire.kernels.reference` says what every function means; other modules must agree with it.

Bytes that leave a device are in the canonical layout, which is the same for all modules:
(num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim), where index 0 of the second axis is keys. Of 8-bit
types the last axis is uint8 (head_dim + 4,): see `reference.quantized`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from quire.config import KVGroup

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)

# gelu_tanh is gelu's tanh approximation, relu2 is relu squared
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh")

Plan = Any  # what a module's `plan` returns; nobody but that module looks inside
Rotation = tuple[Tensor, Tensor]  # cosines and sines, float32 (num_tokens, rotary_dim / 2)


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A weight (rows, columns), or several of that shape, in the layout of the module that packed it."""

    data: Tensor  # of several: (number, ...)
    rows: int
    columns: int
    parts: int = 1  # that the rows were cut into before, as a gated product has them: gates, and what they gate

    def __getitem__(self, index: int) -> "Packed":
        """One of several."""
        return Packed(self.data[index], self.rows, self.columns, self.parts)


Weight = Tensor | Packed


class Purpose(IntEnum):
    """What a random number decides: one word of the Philox counter, so that no two decisions share one."""

    SAMPLE = 0  # which token
    ACCEPT = 1  # whether a draft is kept
    RESIDUAL = 2  # which token replaces a rejected draft


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Keys and values of one group of layers. The layout of `data` is private to the module that made it.

    But for one thing: all that belongs to a block, and nothing else, lies at its number on the axis of blocks.
    """

    group: KVGroup
    block_size: int  # tokens
    data: Tensor
    block_axis: int = 2

    @property
    def by_block(self) -> Tensor:
        """The data of each block (num_blocks, ...): a view."""
        return self.data.movedim(self.block_axis, 0)


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """Block tables that are kept on the device, and grow there by what was appended."""

    tables: Tensor  # int32 (num_rows, width): it stays where it is, and is read when a step is computed
    rows: np.ndarray  # int64 (num_chunks,): which of them is each chunk's


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The chunks of one step as one group sees them: chunk i computes positions [starts[i], stops[i]).

    The tokens of all chunks are concatenated in order. The token at position p of chunk i lies in block
    tables[i, p // block_size], at p % block_size. Entries behind the last position mean nothing, nor do those
    of blocks that lie wholly outside of the group's window before position starts[i]: they may be -1.
    There is at least one token, and no block is written for two chunks.
    """

    starts: np.ndarray  # int64 (num_chunks,)
    stops: np.ndarray  # int64 (num_chunks,)
    tables: np.ndarray  # int64 (num_chunks, width)
    resident: Resident | None = None  # in the place of `tables`, which are empty then: for modules that are RESIDENT


@dataclass(frozen=True, slots=True, eq=False)
class Masks:
    """Rows of logits in which only some tokens may be sampled, each of them once."""

    rows: np.ndarray  # int64
    words: np.ndarray  # uint32 (len(rows), words): bit t%32 of word t//32 allows token t


@dataclass(frozen=True, slots=True, eq=False)
class Edits:
    """What is added to single logits: biases, and -inf for what is banned. Those of one logit add up."""

    rows: np.ndarray  # int64
    tokens: np.ndarray  # int64
    values: np.ndarray  # float32, finite or -inf


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Which tokens came up in sequences with penalties, one entry for each time."""

    rows: np.ndarray  # int64
    tokens: np.ndarray  # int64
    are_output: np.ndarray  # bool: the others are of the prompt


@dataclass(frozen=True, slots=True, eq=False)
class Draws:
    """What sampling has to know about each row of logits: columns with one entry per row, on the host."""

    seeds: np.ndarray  # uint64
    sample_indices: np.ndarray  # int32, which of a request's n sequences
    positions: np.ndarray  # int32, where in its sequence the sampled token will stand
    temperatures: np.ndarray  # float32, 0 is greedy
    top_ps: np.ndarray  # float32 in (0, 1], 1 keeps all
    top_ks: np.ndarray  # int32, 0 or less keeps all
    min_ps: np.ndarray  # float32 in [0, 1], 0 keeps all
    presence_penalties: np.ndarray  # float32, 0 is none
    frequency_penalties: np.ndarray  # float32, 0 is none
    repetition_penalties: np.ndarray  # float32 above 0, 1 is none
    masks: Masks
    edits: Edits
    history: History  # of rows with a penalty; the prompt is left out where no repetition penalty counts it


@dataclass(frozen=True, slots=True)
class Demands:
    """What a module must be able to do to serve a model."""

    device: torch.device
    dtype: str
    kv_dtype: str
    block_size: int
    head_dims: tuple[int, ...]


class Recorded(NamedTuple):
    """What recordings of steps take beside the workspace of other steps."""

    bytes: int
    reason: str


class Recorder(Protocol):
    """Steps of a module that run again without the Python that described them: on the same tensors, refilled."""

    def size(self, num_sequences: int) -> int | None:
        """The size that a step of so many sequences is recorded at, or None where recording it would not pay.

        Where that is larger, the step is filled up with chunks of one token, at position 0, whose tables are -1
        throughout: nothing may be written for them, and what is computed for them may be anything.
        """

    def takes(self, num_sequences: int, token_bytes: int, logit_bytes: int, scratch_bytes: int) -> Recorded:
        """At most, once steps of all sizes up to `num_sequences` are recorded.

        Each token of a step takes `token_bytes` of activations and `logit_bytes` of logits, attention `scratch_bytes`.
        """

    def plan(self, batch: Batch, storage: Storage, width: int) -> Plan:
        """As Kernels.plan, made to be refilled with tables of up to `width` blocks."""

    def refill(self, plan: Plan, batch: Batch) -> None:
        """Put another step with as many chunks and tokens in the place of the one that was planned."""

    def record(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run `compute`, perhaps several times. Returns its result, and what computes it again into the same tensor.

        Weights and inputs must stay where they are. Raises NotRecordable where it did more than call kernels.
        """


class NotRecordable(Exception):
    """What was to be recorded did something that a recording would leave out."""


class Kernels(Protocol):
    """A module with these functions. Shapes name num_tokens: the tokens of all chunks, concatenated."""

    NAME: str
    RESIDENT: bool  # whether it reads block tables that are kept on the device
    SCRATCH_BYTES: int  # that attention takes at most beside its arguments, or one sequence's KV of a layer if more

    recorder: Recorder | None  # what records steps; None where nothing is gained by it

    def refusal(self, demands: Demands) -> str | None:
        """Why the module cannot do what is demanded, or None if it can."""

    def use_threads(self, number: int) -> None:
        """Compute with so many threads from now on, where the module computes on the host."""

    def rest(self) -> None:
        """Nothing is computed for a while: give memory back that is kept only to be used again."""

    def allocate(self, group: KVGroup, block_size: int, device: torch.device) -> Storage:
        """Blocks of zeros for a group. On a CPU, memory is taken only when a block is first written."""

    def pack(self, storage: Storage, blocks: Tensor) -> Tensor:
        """A copy of `blocks` (int64) in the canonical layout."""

    def unpack(self, storage: Storage, blocks: Tensor, canonical: Tensor) -> None:
        """Write `canonical` into `blocks` (int64): the inverse of `pack`."""

    def copy_blocks(self, storage: Storage, pairs: Tensor, num_tokens: int) -> None:
        """Copy the leading tokens of blocks and clear the rest, for all (source, target) `pairs` at once."""

    def plan(self, batch: Batch, storage: Storage) -> Plan:
        """What all layers of a step have in common: computed once, used by `rotary_write` and `attention`."""

    def rotary_write(
        self, storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: Plan
    ) -> Tensor:
        """Rotate q and k, and store keys and values of the `layer`-th layer of the group. Returns q, rotated.

        q (num_tokens, num_heads, head_dim), k and v (num_tokens, num_kv_heads, head_dim). Pairs
        (x[i], x[i + rotary_dim / 2]) are rotated; where rotary_dim is less than head_dim, the dimensions behind it
        stay as they are. Computed in float32, rounded once. rotation: None where nothing is to be rotated.

        A block whose first slot is written is cleared before: what lies behind a sequence's last token is
        always finite, and nobody meets the leavings (NaN, perhaps) of a block's former user.

        All tokens of the step are stored before `attention` reads any: a sequence may share blocks that another
        one writes in the same step.
        """

    def attention(
        self, storage: Storage, layer: int, q: Tensor, plan: Plan, scale: float, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of q (num_tokens, num_heads, head_dim) to the stored positions of its sequence.

        A query at position p attends to positions 0 to p, in a group with a window to the last `window` of them
        (p among them), with softmax(scale * q k); a softcap above 0 makes s = scale * q k into
        softcap * tanh(s / softcap). Consecutive query heads share a KV head.
        Returns (num_tokens, num_heads * head_dim).
        """

    def rotation(self, positions: Tensor, frequencies: Tensor, magnitude: float) -> Rotation:
        """Cosines and sines, times `magnitude`, of positions (num_tokens,) int64 times frequencies in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, rounded once to x's type.

        The weight may be float32 beside an x of a shorter type.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32, rounded once.

        weight and bias: the shape of the last axis, or of the last two, where each row of that pair has its own.
        """

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x). activation: one of ACTIVATIONS."""

    def room(self, shape: Sequence[int], dtype: torch.dtype, parts: int = 1) -> Packed | None:
        """Zeros for a weight (out, in), or (number, out, in), in the layout that this module's products read.

        parts: 2 for the weight of a gated product. None: they read tensors as they are.
        """

    def write_rows(self, weight: Packed, rows: Tensor, start: int, index: int = 0) -> None:
        """Rows (n, in) of any floating point type to the rows from `start` on of a weight that `room` gave, once.

        index: which of several weights.
        """

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
        """x (num_rows, in) times weight (out, in), plus bias (out,)."""

    def gated_linear(self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str) -> Tensor:
        """activation(first half) * second half of the last axis of linear(x, weight, bias); one of ACTIVATIONS."""

    def embed(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """Rows of the weight (num_rows, size) for ids int64 (num_tokens,), times `scale`."""

    def route(self, logits: Tensor, k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """The k experts of each token with the largest of its logits (num_tokens, num_experts), and their weights.

        ids int64 and weights float32 (num_tokens, k), the largest first; which of equal ones is left out is not said.
        A weight is the softmax of all logits in float32, with `normalise` divided by the sum of the token's k.
        """

    def experts(self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str) -> Tensor:
        """The weighted sum of each token's experts, down[e] gated_linear(x, up[e]), in float32, rounded once.

        x (num_tokens, hidden_size), ids int64 and weights float32 (num_tokens, k), a token's ids all different,
        up (num_experts, 2 * inner, hidden_size), down (num_experts, hidden_size, inner).
        Returns the shape of x.
        """

    def sample(self, logits: Tensor, draws: Draws) -> Tensor:
        """One token id per row of logits (num_rows, vocab_size), int64; -1 where nothing can be sampled.

        That is a row with any NaN or +inf, and one in which no logit that may be sampled is above -inf.
        A row's token depends on that row alone. See `reference.sampling` for what is done in which order.
        """

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Natural logarithms of the softmax of logits (num_rows, vocab_size), in float32.

        Returns the values (num_rows, n) of tokens (num_rows, n), int64, n at least 1; the ranks (num_rows,), int32,
        of the first ones: 1 and how many values are larger; and of the k most likely, k at most vocab_size, the
        ids (num_rows, k), int32, and values (num_rows, k): falling, equal values in the order of ids.
        All values of a row with any NaN or +inf are NaN, as are those of one without a logit above -inf.
        """
