"""The memory plan: all memory that an engine will use, in bytes, computed before the weights are loaded."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from quire.core.kv_groups import KVKind
from quire.core.states import StateGroup
from quire.errors import ConfigError, DoesNotFit

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_UNITS |= {f"{unit}b": factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b|[kmgt]i?|)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class KVProfile:
    """The memory that the KV of one group needs."""

    bytes_per_token: int
    kind: KVKind
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProfile:
    """The memory that a model with its options needs."""

    weight_bytes: int
    weight_reason: str
    kv: tuple[KVProfile, ...]
    block_size: int
    model_max_len: int  # context length of the model
    max_model_len: int | None  # the option; None: not set
    max_num_seqs: int
    max_num_batched_tokens: int
    workspace_bytes_per_token: int  # activations of one token in a step
    workspace_bytes_per_seq: int  # tokens, tables and logits of one row
    scratch_bytes: int  # of attention, and of sampling in addition to the logits
    captured_steps_bytes: int = 0  # that captured steps own
    captured_steps_reason: str = ""
    staging_bytes: int = 0  # buffers of swapping on the device
    lora_memory: str | None = None  # the option, or DEFAULT_LORA_MEMORY; None: no adapters
    states: StateGroup | None = None  # of a model with recurrent states; the plan decides on the number of blocks
    has_snapshots: bool = False  # whether a prefix cache keeps states behind prefixes

    @property
    def live_state_bytes(self) -> int:
        """Memory of the recurrent states of all rows, without snapshots."""
        return 0 if self.states is None else self.max_num_seqs * self.states.bytes_per_block

    @property
    def workspace_bytes(self) -> int:
        """Memory of one step while it is computed."""
        return (
            self.max_num_batched_tokens * self.workspace_bytes_per_token
            + self.max_num_seqs * self.workspace_bytes_per_seq
            + self.scratch_bytes
        )

    def blocks_alone(self, length: int) -> list[int]:
        """Per group, the blocks that one sequence of `length` tokens needs if it runs alone."""
        return [kv.kind.max_blocks(length, self.max_num_batched_tokens, self.block_size) for kv in self.kv]

    def kv_bytes(self, length: int) -> int:
        """Bytes of KV that one sequence of `length` tokens needs if it runs alone."""
        return _kv_bytes(self, self.blocks_alone(length))

    def blocks_while_decoding(self, length: int) -> list[int]:
        """Per group, the blocks that a sequence of `length` tokens holds while it decodes."""
        return [kv.kind.max_blocks(length, 1, self.block_size) for kv in self.kv]


@dataclass(frozen=True, slots=True)
class PlanLine:
    """One use of memory, its size and the reason for the size."""

    name: str
    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name:<10} {format_bytes(self.bytes):>10}  {self.reason}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The uses of memory, the sizes of the pools and the longest sequence."""

    profile: MemoryProfile
    lines: tuple[PlanLine, ...]
    num_blocks: tuple[int, ...]  # per group
    max_model_len: int
    max_model_len_reason: str
    lora_bytes: int = 0  # for adapters
    states: StateGroup | None = None  # of a model with recurrent states

    def concurrency(self, length: int) -> int:
        """Number of sequences of `length` tokens that fit at the same time."""
        fits = [
            have // each for have, each in zip(self.num_blocks, self.profile.blocks_while_decoding(length), strict=True)
        ]
        return min(fits if self.states is None else (*fits, self.states.num_blocks))

    def __str__(self) -> str:
        length, block_size = self.max_model_len, self.profile.block_size
        pools = " and ".join(f"{num} blocks of {block_size} = {num * block_size} tokens" for num in self.num_blocks)
        return "\n".join(
            [
                *map(str, self.lines),
                f"{pools}: {self.concurrency(length)} sequences of {length} tokens, or "
                f"{self.concurrency(-(-length // 8))} of {-(-length // 8)}",
                f"max_model_len {length}: {self.max_model_len_reason}",
            ]
        )


def plan_memory(
    profile: MemoryProfile,
    *,
    available: int,
    default_share: float,
    limit: str | None,
    fill_budget: bool = False,
    num_replicas: int = 1,
) -> MemoryPlan:
    """Divide memory between weights, workspace and KV pools.

    available: bytes. default_share: share of them to use if `limit` is None. limit: the option `memory`. fill_budget:
    the pool gets all remaining memory, for a prefix cache; otherwise at most the blocks that `max_num_seqs` sequences
    of `max_model_len` tokens can fill. num_replicas: engines that have as many bytes available each.

    Recurrent states of `max_num_seqs` sequences come first, then the KV of one sequence of `max_model_len` tokens. The
    rest is for KV and snapshots of states. Lowers `max_model_len` to what the KV memory can hold, if it was not set.
    Raises ConfigError if the weights, the states or one sequence of the set length do not fit.
    """
    budget, budget_reason = _budget(available, default_share, limit, num_replicas)
    lora_bytes = _lora_bytes(profile.lora_memory, budget)
    beside = profile.workspace_bytes + profile.captured_steps_bytes + profile.staging_bytes + lora_bytes
    length, length_reason = _max_model_len(profile)
    room = budget - profile.weight_bytes - beside
    if room >= 0:
        _check_live_states(profile, room, f"{format_bytes(budget)}, {budget_reason}")
    room -= profile.live_state_bytes
    if profile.kv_bytes(length) > room:
        if profile.max_model_len is not None or profile.kv_bytes(2) > room:
            need = profile.weight_bytes + beside + profile.live_state_bytes + profile.kv_bytes(length)
            adapters = f"adapters {format_bytes(lora_bytes)}, " if lora_bytes else ""
            live = f"recurrent states {format_bytes(profile.live_state_bytes)}, " if profile.states else ""
            raise DoesNotFit(
                f"one sequence of {length} tokens needs {format_bytes(need)} (weights "
                f"{format_bytes(profile.weight_bytes)}, workspace {format_bytes(beside - lora_bytes)}, {adapters}"
                f"{live}the rest KV), but the budget is {format_bytes(budget)}, {budget_reason}. Raise memory, or "
                f"lower {'data_parallel_size, ' if num_replicas > 1 else ''}{'lora_memory, ' if lora_bytes else ''}"
                "max_model_len, max_num_batched_tokens or max_num_seqs"
            )
        length = _longest_fitting_len(profile, length, room)
        length_reason = f"lowered from {profile.model_max_len}, all that the KV memory can hold"
    states = _with_snapshots(profile, length, room, fill_budget=fill_budget)
    if states is not None:
        room -= (states.num_blocks - profile.max_num_seqs) * states.bytes_per_block
    useful = _max_useful_blocks(profile, length)
    if fill_budget:
        block_bytes = [profile.block_size * kv.bytes_per_token for kv in profile.kv]
        useful = [max(num, room // one) for num, one in zip(useful, block_bytes, strict=True)]
    num_blocks = _divide_among_groups(profile, length, useful, room)
    lines = [PlanLine("weights", profile.weight_bytes, profile.weight_reason)]
    for kv, num, most in zip(profile.kv, num_blocks, useful, strict=True):
        why = f"{num} blocks x {profile.block_size} tokens x {kv.bytes_per_token} B ({kv.reason}); "
        why += (
            f"enough for {profile.max_num_seqs} sequences of {length}"
            if num == most and not fill_budget
            else f"what is left of {format_bytes(budget)}, {budget_reason}"
        )
        name = f"KV pool {kv.kind.span}" if kv.kind.drops_blocks else "KV pool"
        lines.append(PlanLine(name, num * profile.block_size * kv.bytes_per_token, why))
    if states is not None:
        lines.append(_states_line(states, profile.max_num_seqs))
    lines += _other_lines(profile)
    if lora_bytes:
        lines.append(PlanLine("adapters", lora_bytes, _lora_reason(profile.lora_memory)))
    return MemoryPlan(profile, tuple(lines), tuple(num_blocks), length, length_reason, lora_bytes, states)


def _check_live_states(profile: MemoryProfile, room: int, budget: str) -> None:
    """Raise DoesNotFit if `room` bytes do not hold a recurrent state of each row. budget: in words."""
    if profile.states is None or profile.live_state_bytes <= room:
        return
    each = profile.states.bytes_per_block
    raise DoesNotFit(
        f"{profile.max_num_seqs} sequences have recurrent states of {format_bytes(each)} each, "
        f"{format_bytes(profile.live_state_bytes)} in all, but beside weights and workspace {format_bytes(room)} are "
        f"left of the budget, {budget}. Raise memory, or lower max_num_seqs: {room // each} states fit, without any KV"
    )


_TOKENS_PER_SNAPSHOT = 1024  # of KV; docs/memory.md has the reason
_MOST_SNAPSHOT_SHARE = 0.5  # of the memory for KV and snapshots
_MOST_SNAPSHOTS_PER_ROW = 16  # where memory is left to other programs


def _with_snapshots(profile: MemoryProfile, length: int, room: int, *, fill_budget: bool) -> StateGroup | None:
    """The state blocks: one for each row, and snapshots in proportion to the KV of a sequence of `length` tokens.

    room: bytes for KV and snapshots. What one such sequence needs is KV in any case. Unless `fill_budget` is set, there
    are at most the snapshots that `max_num_seqs` such sequences can use.
    """
    states = profile.states
    if states is None:
        return None
    num_snapshots = 0
    if profile.has_snapshots:
        size, sequence = states.bytes_per_block, profile.kv_bytes(length)
        share = min(_MOST_SNAPSHOT_SHARE, size / (size + sequence * _TOKENS_PER_SNAPSHOT / length))
        num_snapshots = int((room - sequence) * share) // size
        if not fill_budget:
            each = min(_MOST_SNAPSHOTS_PER_ROW, -(-length // _TOKENS_PER_SNAPSHOT))
            num_snapshots = min(num_snapshots, profile.max_num_seqs * each)
    return replace(states, num_blocks=profile.max_num_seqs + num_snapshots)


def _states_line(states: StateGroup, num_rows: int) -> PlanLine:
    number, size = states.num_blocks, states.bytes_per_block
    why = (
        f"{number} blocks x {format_bytes(size)} ({states.num_layers} layers of {states.kind}, {states.dtype}): "
        f"one for each of {num_rows} rows, {number - num_rows} snapshots"
    )
    return PlanLine("states", number * size, why)


DEFAULT_LORA_MEMORY = "default"
_LORA_SHARE, _MOST_LORA_BYTES = 8, 2**30  # by default an eighth of the budget, at most so many bytes


def _lora_bytes(asked: str | None, budget: int) -> int:
    """Bytes for adapters. Raises ConfigError for text that names no size."""
    if asked is None:
        return 0
    if asked == DEFAULT_LORA_MEMORY:
        return min(_MOST_LORA_BYTES, budget // _LORA_SHARE)
    return int(parse_memory(asked, budget, "lora_memory"))


def _lora_reason(asked: str | None) -> str:
    if asked != DEFAULT_LORA_MEMORY:
        return f"LoRA adapters, lora_memory={asked}"
    return f"LoRA adapters, at most {format_bytes(_MOST_LORA_BYTES)} (lora_memory not set)"


def _other_lines(profile: MemoryProfile) -> list[PlanLine]:
    """The lines of workspaces."""
    why = (
        f"{profile.max_num_batched_tokens} tokens a step x {format_bytes(profile.workspace_bytes_per_token)}, "
        f"{profile.max_num_seqs} rows x {format_bytes(profile.workspace_bytes_per_seq)}, "
        f"attention and sampling {format_bytes(profile.scratch_bytes)}"
    )
    lines = [PlanLine("workspace", profile.workspace_bytes, why)]
    if profile.captured_steps_bytes:
        lines.append(PlanLine("captured", profile.captured_steps_bytes, profile.captured_steps_reason))
    if profile.staging_bytes:
        lines.append(PlanLine("staging", profile.staging_bytes, "buffer for copies of blocks to and from host memory"))
    return lines


def _kv_bytes(profile: MemoryProfile, num_blocks: Sequence[int]) -> int:
    return sum(num * profile.block_size * kv.bytes_per_token for num, kv in zip(num_blocks, profile.kv, strict=True))


def _longest_fitting_len(profile: MemoryProfile, length: int, available_bytes: int) -> int:
    """The longest sequence, below `length` tokens, whose KV takes at most `available_bytes`."""
    counts = range(2, length)
    fits = bisect_left(counts, 1, key=lambda count: profile.kv_bytes(count) > available_bytes)
    return counts[fits - 1]


def _max_useful_blocks(profile: MemoryProfile, length: int) -> list[int]:
    """Per group, the most blocks that `max_num_seqs` sequences of `length` tokens can fill."""
    alone, each = profile.blocks_alone(length), profile.blocks_while_decoding(length)
    return [most + (profile.max_num_seqs - 1) * one for most, one in zip(alone, each, strict=True)]


def _divide_among_groups(profile: MemoryProfile, length: int, useful: Sequence[int], available_bytes: int) -> list[int]:
    """Blocks per group for the same number of sequences, of a quarter of `length`, in each group.

    A group gets at most its `useful` blocks, and at least what one sequence of `length` needs.
    """
    least, each = profile.blocks_alone(length), profile.blocks_while_decoding(-(-length // 4))
    unit = max(each)

    def blocks(shares: int) -> list[int]:
        wanted = (shares * one // unit for one in each)
        return [min(max(num, low), high) for num, low, high in zip(wanted, least, useful, strict=True)]

    counts = range(unit * max(useful) + 1)
    too_many = bisect_left(counts, 1, key=lambda shares: _kv_bytes(profile, blocks(shares)) > available_bytes)
    return blocks(too_many - 1)


def parse_memory(text: str, available: int, option: str = "memory") -> float:
    """Bytes of '4GiB', '500MB' or '123456789'. A number up to 1 without a unit is a share of `available`.

    Raises ConfigError for other text, and for 0. option: its name in the error.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise ConfigError(
            f"{option} must be bytes ('4GiB', '500MB', '123456789') or a share up to 1 ('0.5'), not {text!r}"
        )
    number, unit = float(match[1]), match[2].lower()
    return number * (available if number <= 1 and not unit else _UNITS[unit])


def format_bytes(num_bytes: float) -> str:
    """A number of bytes as text with a unit: '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def _budget(available: int, default_share: float, limit: str | None, num_replicas: int) -> tuple[int, str]:
    each = _each_of(num_replicas)
    if limit is None:
        reason = f"{default_share:.0%} of the {format_bytes(available)} available{each} (memory not set)"
        return int(available * default_share), reason
    asked = parse_memory(limit, available)
    if asked > available:
        fewer = "; lower memory or data_parallel_size" if each else ""
        raise ConfigError(f"memory={limit} is more than the {format_bytes(available)} available{each}{fewer}")
    return int(asked), f"memory={limit}{each}"


def _each_of(num_replicas: int) -> str:
    return f" for each of {num_replicas} replicas" if num_replicas > 1 else ""


def _max_model_len(profile: MemoryProfile) -> tuple[int, str]:
    if profile.max_model_len is None:
        return profile.model_max_len, "the model's own context"
    if not 2 <= profile.max_model_len <= profile.model_max_len:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {profile.model_max_len}, not {profile.max_model_len}"
        )
    return profile.max_model_len, "as configured"


DEFAULT_SWAP_SPACE = 4 * 2**30  # bytes, for a device with memory of its own
_LARGEST_SHARE = 0.25  # of the available host memory, if no size was set
_GIB = 2**30
_NUMBER = re.compile(r"\s*\d+(\.\d+)?\s*")
_MOST_GIB = 4096  # a number from here on is in bytes


class HostPoolPlan(NamedTuple):
    """The blocks of the host pool per group, its line of the memory plan, and its blocks for recurrent states."""

    num_blocks: tuple[int, ...]
    line: PlanLine | None  # None without a host pool
    num_state_blocks: int = 0


def parse_swap_space(text: str) -> int:
    """Bytes of '4GiB' or '500MB'. A plain number below 4096 is in GiB, as in vLLM; a larger one is in bytes.

    Raises ConfigError for other text.
    """
    if _NUMBER.fullmatch(text):
        number = float(text)
        return int(number * _GIB if number < _MOST_GIB else number)
    try:
        return int(parse_memory(text, 0))
    except ConfigError as error:
        raise ConfigError(
            f"swap_space must be bytes ('4GiB', '500MB') or a number of GiB ('4'), not {text!r}"
        ) from error


def plan_host_pool(
    plan: MemoryPlan, *, asked: str | None, default: int, available: int, num_replicas: int = 1
) -> HostPoolPlan:
    """Divide host memory among KV groups and recurrent states in proportion to their device blocks.

    asked: the option `swap_space`; None: not set. default: bytes if it is not set, at most a quarter of `available`.
    available: bytes of host memory that the rest of the plan does not use. num_replicas: as in `plan_memory`.

    Raises ConfigError if `asked` exceeds `available` or holds less than one block of each.
    """
    nothing = HostPoolPlan((0,) * len(plan.num_blocks), None)
    wanted = min(default, int(available * _LARGEST_SHARE)) if asked is None else parse_swap_space(asked)
    if wanted <= 0:
        return nothing
    if wanted > available:
        each = _each_of(num_replicas)
        fewer = "; lower swap_space or data_parallel_size" if each else ""
        raise ConfigError(
            f"swap_space={asked} is more than the {format_bytes(available)} of host memory available{each}{fewer}"
        )
    block_bytes = [kv.bytes_per_token * plan.profile.block_size for kv in plan.profile.kv]
    device_blocks = [*plan.num_blocks]
    if plan.states is not None:
        block_bytes.append(plan.states.bytes_per_block)
        device_blocks.append(plan.states.num_blocks)
    num_blocks = _divide_host_bytes(device_blocks, block_bytes, wanted)
    if not all(num_blocks):
        if asked is None:
            return nothing
        raise ConfigError(
            f"swap_space={asked} holds no block of {format_bytes(sum(block_bytes))}; give it more, or 0 to have no "
            "host pool"
        )
    taken = sum(num * one for num, one in zip(num_blocks, block_bytes, strict=True))
    num_blocks, num_states = num_blocks[: len(nothing.num_blocks)], sum(num_blocks[len(nothing.num_blocks) :])
    blocks = " and ".join(map(str, num_blocks))
    states = f" and {num_states} recurrent states" if num_states else ""
    asked_by = "by default" if asked is None else f"swap_space={asked}"
    why = f"{blocks} blocks of {plan.profile.block_size} tokens{states} in host memory, {asked_by}; no part of memory"
    return HostPoolPlan(num_blocks, PlanLine("host pool", taken, why), num_states)


def _divide_host_bytes(device_blocks: Sequence[int], block_bytes: Sequence[int], wanted: int) -> tuple[int, ...]:
    whole = sum(num * one for num, one in zip(device_blocks, block_bytes, strict=True))
    return tuple(num * wanted // whole for num in device_blocks)
