"""The contract of kernel modules: their functions with the data types of the arguments.

A kernel module owns the layout of blocks on its device. It has no access to models, requests or schedules.
`quire.kernels.reference` is the specification of every function; other modules must agree with it.

KV that leaves a device is in the canonical layout, which is the same for all modules:
(num_layers, planes, num_blocks, block_size, num_kv_heads, head_dim), where index 0 of the second axis is keys, and
index 1 is values if the kind of KV has them apart from keys (`core/kv_groups.py`). For
types of 8 and 4 bits the last axis is uint8 with scales: see `reference.quantized`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, make_dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, cast

import msgspec
import numpy as np
import torch
from torch import Tensor

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.states import StateGroup, StateKind
from quire.kernels.sampling_contract import SamplingMetadata
from quire.kernels.state_contract import RecurrenceWeights, StateBatch, StateStorage

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
)

# gelu_tanh is the tanh approximation of gelu, relu2 is relu squared
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "sigmoid", "tanh", "softplus")

Plan = Any  # what a module's `plan` returns; opaque outside of that module
Rotation = tuple[Tensor, Tensor]  # cosines and sines, float32 (num_tokens, rotary_dim / 2)


Grid = Literal["int", "e2m1", "iq4_nl", "e4m3"]

# the numbers of the codes of a 4-bit grid, in units of the scale
GRIDS: Mapping[Grid, tuple[int, ...]] = MappingProxyType(
    {
        "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),  # doubled: scales are half the format's
        "iq4_nl": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    }
)
FACTOR_COLUMNS = 256  # that share factors of scales
_TYPE_NAMES: Mapping[Grid, str] = MappingProxyType({"e2m1": "fp4_e2m1", "iq4_nl": "iq4_nl", "e4m3": "fp8_e4m3"})


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage of a low-bit weight: value = scale * number + offset, with unsigned codes of `bits` bits for the numbers.

    With factors, scales and offsets are 8-bit integers. Each FACTOR_COLUMNS columns of a row have a factor for scales
    and one for offsets: value = factor * scale * number + offset_factor * offset. GGUF's K-quants are such.

    The grid has the number of each code. "int": code - zero_point. "e2m1", "iq4_nl": GRIDS[grid][code], 4 bits.
    "e4m3": the float8 (e4m3fn) number with these bits.

    Products round x to 8 bits, with a scale for each x_group_size columns of a row, so that a row's result depends on
    this row alone. With the grid "e4m3" they do not round x. `quire.kernels.reference.codes` specifies the rounding of
    weights and of x.
    """

    bits: int  # 8, 6 or 4
    group_size: int = 0  # columns that share a scale; 0: all columns of a row
    scale_dtype: torch.dtype = torch.float32  # also of offsets; of factors if there are any
    has_offsets: bool = False  # one for each scale; otherwise the offset is 0
    grid: Grid = "int"
    has_factors: bool = False  # then group_size divides FACTOR_COLUMNS

    @property
    def zero_point(self) -> int:
        """The code whose value is the offset, if the grid is "int"."""
        return 0 if self.has_factors and self.has_offsets else 1 << (self.bits - 1)

    @property
    def type_name(self) -> str:
        """The type of the codes: "int8", "fp4_e2m1"."""
        return _TYPE_NAMES.get(self.grid, f"int{self.bits}")

    @property
    def x_group_size(self) -> int:
        """Columns of x that share a scale in products. They are in one group of the weight.

        They are a compromise of accuracy and time: `benchmarks.real --only x_groups`. 64 columns are one AMX register.
        """
        size = 32 if 0 < self.group_size <= 64 else 64
        return self.group_size if self.group_size % size else size

    def num_groups(self, columns: int) -> int:
        """Number of scales of a row. The last group may be shorter."""
        return -(-columns // self.group_size) if self.group_size else 1

    def num_factors(self, columns: int) -> int:
        """Number of factors of the scales of a row; 0 if the scheme has none."""
        return -(-columns // FACTOR_COLUMNS) if self.has_factors else 0

    def num_bytes(self, rows: int, columns: int) -> int:
        """Bytes of a weight's codes, scales, offsets and factors, without padding."""
        each = 1 if self.has_factors else self.scale_dtype.itemsize
        scales = self.num_groups(columns) * each + self.num_factors(columns) * self.scale_dtype.itemsize
        return rows * (-(-columns * self.bits // 8) + scales * (1 + self.has_offsets))

    def __str__(self) -> str:
        groups = f"groups of {self.group_size}" if self.group_size else "one scale a row"
        parts = [name for name, has in (("offsets", self.has_offsets), ("factors", self.has_factors)) if has]
        return f"{self.type_name}, {groups}" + (f" with {' and '.join(parts)}" if parts else "")


INT8, INT4, FP8 = Scheme(8), Scheme(4, 32, torch.bfloat16), Scheme(8, grid="e4m3")
MXFP4, NVFP4 = (Scheme(4, size, torch.bfloat16, grid="e2m1") for size in (32, 16))  # as rounded at load


class QuantizedRows(NamedTuple):
    """Rows of a low-bit weight before they are packed."""

    codes: Tensor  # uint8 (n, columns)
    scales: Tensor  # Scheme.scale_dtype (n, num_groups), or int8 if there are factors
    offsets: Tensor | None = None  # like scales, if Scheme.has_offsets
    factors: Tensor | None = None  # Scheme.scale_dtype (n, num_factors, 1), or 2 with those of offsets

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> "QuantizedRows":
        """Rows moved or selected by `change`, which is applied to all parts."""
        offsets, factors = (some if some is None else change(some) for some in self[2:])
        return QuantizedRows(change(self.codes), change(self.scales), offsets, factors)


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight (rows, columns), or a stack of such weights, in the layout of the module that packed it."""

    data: Tensor  # of a stack: (number, ...)
    rows: int
    columns: int
    dtype: torch.dtype  # of x and of the results
    parts: int = 1  # equal parts of the rows that are packed separately; 2 for gate and up of a gated product
    scheme: Scheme | None = None  # None: `data` has numbers of `dtype`
    scales: Tensor | None = None  # of codes, which may have factors and offsets in them; of a stack: (number, ...)
    offsets: Tensor | None = None  # like scales

    def __getitem__(self, index: int) -> "PackedWeight":
        """One weight of a stack."""
        scales, offsets = (some if some is None else some[index] for some in (self.scales, self.offsets))
        return replace(self, data=self.data[index], scales=scales, offsets=offsets)

    @property
    def num_bytes(self) -> int:
        """Bytes of the memory that the weight has, padding included."""
        return sum(some.nbytes for some in (self.data, self.scales, self.offsets) if some is not None)


Weight = Tensor | PackedWeight


class LowRank(NamedTuple):
    """The matrices of an adapter (Hu et al., 2021) for rows of a weight: scale * (b (a x) + bias) is added to them."""

    a: Tensor  # (rank, in)
    b: Tensor  # (n, rank)
    start: int  # row of the weight to which the first row of b belongs
    scale: float
    bias: Tensor | None = None  # (n,)

    @property
    def terms(self) -> int:
        """Numbers of the product with `a` that are multiplied with `b`; a bias is one more."""
        return len(self.a) + (self.bias is not None)


def low_rank_bytes(rank: int, rows: int, columns: int, itemsize: int, *, has_bias: bool) -> int:
    """A bound of the bytes of a LowRank for `rows` rows in the layout of any module.

    Modules pad `rows` to tiles of 16 in each of two parts, and the terms to an even number.
    """
    terms = -(-(rank + has_bias) // 2) * 2
    return itemsize * (rank * columns + (rows + 4 * 16) * terms)


AdapterTable = Any  # what a module's `new_adapter_table` returns; opaque outside of that module
PackedAdapter = Any  # the same of `pack_adapter`
Addend = Any  # the same of `low_rank`


class Purpose(IntEnum):
    """The use of a random number. It is one word of the Philox counter, so that no two uses share a number."""

    SAMPLE = 0  # selects the token, at positions behind drafts as at others


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """KV blocks of one KV group. The layout of `data` is private to the module that allocated it.

    One property is common to all modules: index i of `block_axis` has all data of block i and nothing else.
    """

    group: KVGroup
    block_size: int  # tokens
    data: Tensor
    block_axis: int = 2

    @property
    def by_block(self) -> Tensor:
        """A view of the data with the axis of blocks first: (num_blocks, ...)."""
        return self.data.movedim(self.block_axis, 0)


@dataclass(frozen=True, slots=True, eq=False)
class ResidentTables:
    """Block tables that stay on the device. A step sends only the block ids that were appended."""

    tables: Tensor  # int32 (num_rows, width); its address is fixed, and kernels read it during the step
    rows: np.ndarray  # int64 (num_chunks,): the row of `tables` of each chunk


class Batch(msgspec.Struct, frozen=True, eq=False):
    """The chunks of one step for one KV group: chunk i computes positions [starts[i], stops[i]).

    The tokens of all chunks are concatenated in order. The token at position p of chunk i is in block
    tables[i, p // block_size], at p % block_size. Entries after the last position are undefined and may be -1, and so
    are entries of blocks that are completely outside of the group's window at position starts[i].
    There is at least one token, and no block is written for two chunks. In captured steps a chunk may have no tokens,
    or several chunks of one token follow each other in one sequence.
    """

    starts: np.ndarray  # int64 (num_chunks,)
    stops: np.ndarray  # int64 (num_chunks,)
    tables: np.ndarray  # int64 (num_chunks, width)
    resident: ResidentTables | None = None  # replaces empty `tables`; for modules with USES_RESIDENT_TABLES
    ends: np.ndarray | None = None  # int64 (num_chunks,): position after the sequence's last token; None: `stops`


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are selected from a router's logits, and weighted.

    Each expert has a score in float32: the softmax over all logits, or the sigmoid of its logit. The k experts with the
    largest score plus bias are selected. With groups, only experts of the `top_groups` groups are, a group's value
    being the sum of its two largest. The weights of a token's experts are their scores, without bias.

    With "sparsemixer" (Liu et al., 2024) experts are selected by their logits. The weight of one is its share in a
    softmax over the experts that are not selected before it and whose logits are near its own logit m: (m - x) /
    max(|x|, m) is at most 2 * jitter.
    """

    normalise: bool  # whether the weights of a token are divided by their sum
    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    scale: float = 1.0  # factor of the weights
    num_groups: int = 1  # of experts that follow each other, each of at least two
    top_groups: int = 1
    jitter: float = 0.0  # of "sparsemixer"


@dataclass(frozen=True, slots=True)
class Requirements:
    """Requirements of a model on a kernel module."""

    device: torch.device
    dtype: str
    kv_dtype: str
    block_size: int
    head_dims: tuple[int, ...]
    schemes: tuple[Scheme, ...] = ()  # of low-bit weights
    kv_kinds: tuple[KVKind, ...] = ()
    state_kind: StateKind | None = None  # of layers with a recurrence


def unsupported_kind_reason(requirements: Requirements) -> str | None:
    """Why a module that keeps keys and values of one size does not meet the requirements, or None if it does."""
    for kind in requirements.kv_kinds:
        if kind.planes != (kind.head_dim, kind.head_dim):
            sizes = " and ".join(map(str, kind.planes))
            return f"it keeps keys and values of {kind.head_dim} numbers each, not KV of the kind {kind} with {sizes}"
    return None


class CaptureMemory(NamedTuple):
    """Memory that captured steps need in addition to the workspace of other steps."""

    bytes: int
    reason: str


class StepCapture(Protocol):
    """Captures steps of a module and replays them without Python, on the same tensors with new contents."""

    def capture_size(self, num_tokens: int, max_num_seqs: int) -> int | None:
        """The number of tokens at which such a step is captured, or None if it is not captured.

        If it is larger than `num_tokens`, the step is padded with chunks of one token at position 0 whose tables are
        all -1. Kernels must not write anything for them. Their results are undefined. Each captured step has as many
        chunks as tokens. Longer chunks are divided into chunks of one token for modules with USES_RESIDENT_TABLES. For
        others, the missing chunks are added without tokens. max_num_seqs: the argument of `capture_memory`.
        """

    def capture_memory(
        self, max_num_seqs: int, token_bytes: int, logit_bytes: int, scratch_bytes: int, variants: int = 1
    ) -> CaptureMemory:
        """The most memory of captured steps of an engine with up to `max_num_seqs` sequences.

        variants: steps that are captured for each number of tokens: 2 with adapters.
        Each token of a step needs `token_bytes` of activations and `logit_bytes` of logits, attention `scratch_bytes`.
        """

    def plan(self, batch: Batch, storage: Storage, width: int) -> Plan:
        """A plan like that of Kernels.plan, which `refill` can update with tables of up to `width` blocks."""

    def refill(self, plan: Plan, batch: Batch) -> None:
        """Replace the step of a plan by another one with the same numbers of chunks and tokens, in place."""

    def plan_states(self, batch: StateBatch, storage: StateStorage) -> Plan:
        """A plan like that of Kernels.plan_states, which `refill_states` can update."""

    def refill_states(self, plan: Plan, batch: StateBatch) -> None:
        """Replace the step of a plan by another one with the same numbers of chunks and tokens, in place.

        Chunks are never divided: those that are missing have no tokens. The number of snapshots is 0.
        """

    def prepare(self, plan: Plan) -> None:
        """Compute the parts of a plan that `refill` leaves out. Called inside the capture, before the model."""

    def capture(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Callable[[], None]]:
        """Run `compute`, perhaps several times. Returns its result, and a function that replays it into this tensor.

        Weights and inputs must keep their addresses. Raises NotCapturable if `compute` does more than call kernels.
        """


class NotCapturable(Exception):
    """The computation includes an operation that cannot be captured."""


class Kernels(Protocol):
    """A kernel module. In shapes, num_tokens counts the tokens of all chunks, concatenated."""

    NAME: str
    USES_RESIDENT_TABLES: bool  # whether it reads block tables that stay on the device
    SCRATCH_BYTES: int  # the most workspace of attention, unless the KV of one sequence and layer needs more

    def unsupported_reason(self, requirements: Requirements) -> str | None:
        """Why the module does not meet the requirements, or None if it does."""

    def use_threads(self, number: int) -> None:
        """Set the number of host threads."""

    def release_workspace(self) -> None:
        """Release workspace that is kept only for reuse. Called when the engine is idle."""

    def new_step_capture(self) -> StepCapture | None:
        """A StepCapture for one engine; None if capture is not supported or has no benefit."""

    def allocate(self, group: KVGroup, block_size: int, device: torch.device) -> Storage:
        """Zeroed blocks for a KV group. CPU modules commit memory only when a block is first written."""

    def pack(self, storage: Storage, blocks: Tensor) -> Tensor:
        """A copy of `blocks` (int64) in the canonical layout."""

    def unpack(self, storage: Storage, blocks: Tensor, canonical: Tensor) -> None:
        """Write `canonical` into `blocks` (int64): the inverse of `pack`."""

    def copy_blocks(self, storage: Storage, pairs: Tensor, num_tokens: int) -> None:
        """Copy the first `num_tokens` of each source block to its target and zero the rest of the target.

        pairs: int64 (num_pairs, 2) of (source, target). All sources are read before the first target is written.
        """

    def plan(self, batch: Batch, storage: Storage) -> Plan:
        """Metadata of a step that all layers share, for `rotary_write` and `attention`."""

    def rotary_write(
        self, storage: Storage, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation | None, plan: Plan
    ) -> Tensor:
        """Rotate q and k, and store keys and values of the `layer`-th layer of the group. Returns the rotated q.

        q (num_tokens, num_heads, head_dim), k and v (num_tokens, num_kv_heads, head_dim). Pairs
        (x[i], x[i + rotary_dim / 2]) are rotated; dimensions from rotary_dim on are unchanged. Computed in float32,
        rounded once. rotation: None for models without rotary embedding.

        If the first slot of a block is written, the rest of the block becomes zeros or tokens of this step. So the
        slots after the last token of a sequence are always finite, whatever the block held before (perhaps NaN).

        All tokens of the step are stored before `attention` reads any, because a sequence may share blocks that
        another one writes in the same step.
        """

    def attention(
        self, storage: Storage, layer: int, q: Tensor, plan: Plan, scale: float, softcap: float = 0.0
    ) -> Tensor:
        """Causal attention of q (num_tokens, num_heads, head_dim) to the stored positions of its sequence.

        A query at position p attends to positions 0 to p, in a group with a window to the last `window` of them,
        p included, with softmax(scale * q k). A softcap above 0 replaces s = scale * q k by
        softcap * tanh(s / softcap). Consecutive query heads share a KV head. If keys are int8, a module may round q to
        8 bits with a scale for each head.
        Returns (num_tokens, num_heads * head_dim).
        """

    def allocate_states(self, group: StateGroup, device: torch.device) -> StateStorage:
        """Zeroed state blocks. CPU modules commit memory only when a block is first written."""

    def copy_states(self, storage: StateStorage, pairs: Tensor) -> None:
        """Copy blocks as a whole: pairs int64 (num_pairs, 2) of (source, target).

        All sources are read before the first target is written.
        """

    def plan_states(self, batch: StateBatch, storage: StateStorage) -> Plan:
        """Metadata of a step that all layers with a state share, for `recur`."""

    def recur(
        self, storage: StateStorage, layer: int, inputs: Tensor, weights: RecurrenceWeights, plan: Plan
    ) -> Tensor:
        """The recurrence of a layer over the inputs (num_tokens, width) of the step, which updates the state blocks.

        `reference.states` specifies it. Returns (num_tokens, num_values) in the type of the inputs.
        """

    def rotation(self, positions: Tensor, frequencies: Tensor, magnitude: float) -> Rotation:
        """Cosines and sines, times `magnitude`, of positions (num_tokens,) int64 times frequencies in float32."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) * weight over the last axis, computed in float32, rounded once to x's type.

        The weight may be float32 if x has a shorter type.
        """

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual)."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias over the last axis, in float32, rounded once.

        weight and bias: (size,), or (heads, size) for x (..., heads, size).
        """

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x). activation: one of ACTIVATIONS."""

    def xielu(self, x: Tensor, parameters: Tensor) -> Tensor:
        """xIELU (Huang and Schlag, 2024) in float32, rounded once. parameters: float32 (4,): a, b, beta and eps.

        softplus(a) x^2 + beta x for x above 0, else (beta + softplus(b)) (expm1(min(x, eps)) - x) + beta x.
        """

    def multiply_add(self, x: Tensor, factors: Tensor | float, addend: Tensor | None = None) -> Tensor:
        """x * factors + addend in float32, rounded once to x's type.

        x and addend (num_rows, n * size). factors: a number, or (num_rows, n) or (1, n), the same for all rows, in x's
        type or float32: each is that of `size` numbers that follow each other.
        """

    def concatenate(self, x: Tensor, y: Tensor) -> Tensor:
        """x (num_rows, n) and y (num_rows, m) of the same type, side by side: contiguous, (num_rows, n + m)."""

    def widen(self, x: Tensor) -> Tensor:
        """x (num_rows, size) in float32; x itself if it is float32."""

    def rotate(self, x: Tensor, rotation: Rotation) -> Tensor:
        """x (num_tokens, num_heads, head_dim) rotated as by `rotary_write`."""

    def allocate_weight(
        self, shape: Sequence[int], dtype: torch.dtype, parts: int = 1, scheme: Scheme | None = None
    ) -> PackedWeight | None:
        """A zeroed weight (out, in), or stack (number, out, in), in the layout that this module's products read.

        dtype: of x and of the results. parts: 2 for the weight of a gated product. scheme: of a low-bit weight.
        Returns None if products read plain tensors, unless there is a scheme.
        """

    def write_rows(self, weight: PackedWeight, rows: Tensor | QuantizedRows, start: int, index: int = 0) -> None:
        """Write `rows` (n, in) to rows [start, start + n) of a weight from `allocate_weight`.

        rows: of any float type, which are rounded to the weight's type or scheme, or in the weight's scheme. Each row
        may be written only once. index: of the weight in a stack.
        """

    def linear(self, x: Tensor, weight: Weight, bias: Tensor | None = None, addend: Addend | None = None) -> Tensor:
        """x (num_rows, in) times weight (out, in), plus addend, plus bias (out,), rounded once.

        addend: of `low_rank`, for the same x and a table of this weight.
        """

    def gated_linear(
        self, x: Tensor, weight: Weight, bias: Tensor | None, activation: str, addend: Addend | None = None
    ) -> Tensor:
        """activation(first half) * second half of the last axis of linear(x, weight, bias, addend)."""

    def new_adapter_table(self, weight: Weight, num_slots: int) -> AdapterTable:
        """The adapters of the products with a weight, by slot: 1 to `num_slots`, none at first. Slot 0 has never one.

        Kernels read it during a step. Its address is fixed.
        """

    def pack_adapter(self, weight: Weight, matrices: Sequence[LowRank]) -> PackedAdapter:
        """The matrices of one adapter for a weight in this module's layout, in the type of x, on the weight's device.

        The rows of several may not overlap. Any thread may call it. Raises ValueError for matrices that do not fit.
        """

    def set_adapter(self, table: AdapterTable, slot: int, packed: PackedAdapter | None) -> None:
        """Put a packed adapter into a slot, in place of the one before; None: empty it.

        The table refers to `packed` from then on. No launched step may use the slot.
        """

    def low_rank(self, x: Tensor, table: AdapterTable, slots: Tensor, width: int) -> Addend:
        """For x (num_rows, in) what the adapters in `slots` (int32, (num_rows,)) add to the product: see LowRank.

        Slot 0 and empty slots add nothing. width: at least the terms of each of these adapters, see `adapter_width`.
        a x is in float32, times the scale; a module may round it to the type of x. The sums with b are in float32.
        """

    def adapter_width(self, packed: PackedAdapter) -> int:
        """The `width` that `low_rank` needs for a packed adapter."""

    def embed(self, ids: Tensor, weight: Weight, scale: float = 1.0) -> Tensor:
        """Rows of weight (num_rows, size) for ids int64 (num_tokens,), times `scale`."""

    def route(
        self, logits: Tensor, k: int, routing: Routing, bias: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The k experts of each token by its logits (num_tokens, num_experts), and their weights: see Routing.

        bias and scales: float32 (num_experts,), not with "sparsemixer"; scales are factors of the experts' weights.
        Returns ids int64 and weights float32 (num_tokens, k), the first selected first. The order of ties is undefined.
        """

    def experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, up: Weight, down: Weight, activation: str, *, gated: bool = True
    ) -> Tensor:
        """The weighted sum of each token's experts, down[e] gated_linear(x, up[e]), in float32, rounded once.

        x (num_tokens, hidden_size), ids int64 and weights float32 (num_tokens, k), the ids of a token distinct,
        up (num_experts, 2 * inner, hidden_size), down (num_experts, hidden_size, inner). Without gates, up is
        (num_experts, inner, hidden_size), and an expert is down[e] activation(up[e] x). Returns the shape of x.
        """

    def sample(self, logits: Tensor, sampling_metadata: SamplingMetadata) -> Tensor:
        """One token id per row of logits (num_rows, vocab_size), int64; -1 if nothing can be sampled.

        It is -1 for a row with any NaN or +inf, and for a row in which every allowed logit is -inf.
        A row's token depends on that row alone. `reference.sampling` specifies the operations and their order.
        """

    def logprobs(self, logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Natural logarithms of the softmax of logits (num_rows, vocab_size), in float32.

        Returns the values (num_rows, n) of tokens (num_rows, n), int64, n at least 1; the ranks (num_rows,), int32,
        of the tokens of the first column: 1 + the number of larger values in the row; and of the k most likely
        tokens, k at most vocab_size, the ids (num_rows, k), int32, and the values (num_rows, k), in descending order,
        ties by id. All values are NaN in a row with any NaN or +inf, and in a row of -inf only.
        """


# the names that a kernel module has
CONTRACT = (*Kernels.__annotations__, *(name for name in vars(Kernels) if name[0] != "_"))
_Record = make_dataclass(
    "Kernels", [(name, Any) for name in CONTRACT], frozen=True, slots=True, kw_only=True, repr=False
)


def new_kernels(**functions: Any) -> Kernels:  # noqa: ANN401  (each has the type that Kernels gives it)
    """A kernel module as one record. Raises TypeError if a name of the contract is missing, or another one is given."""
    return cast(Kernels, _Record(**functions))


def replace_kernels(kernels: Kernels, **functions: Any) -> Kernels:  # noqa: ANN401
    """A kernel module that has these functions, and all others from `kernels`. Raises TypeError for an unknown name."""
    return cast(Kernels, replace(cast(Any, kernels), **functions))
