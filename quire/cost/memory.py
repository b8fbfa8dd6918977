"""The memory plan: every byte an engine will use, named, before anything is loaded."""

import re
from dataclasses import dataclass

from quire.errors import ConfigError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_UNITS |= {f"{unit}b": factor for unit, factor in _UNITS.items()}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*((?:[kmgt]i?)?b|[kmgt]i?|)", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What a model and its options ask of memory."""

    weight_bytes: int
    weight_reason: str
    kv_bytes_per_token: int
    kv_reason: str
    block_size: int
    model_max_len: int  # what the model was made for
    max_model_len: int | None  # what was asked for
    max_num_seqs: int
    max_num_batched_tokens: int
    workspace_bytes_per_token: int  # activations of one token in a step
    workspace_bytes_per_seq: int  # logits and sampling of one row
    scratch_bytes: int  # of attention


@dataclass(frozen=True, slots=True)
class Line:
    """One use of memory and why it has this size."""

    name: str
    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{self.name:<10} {size(self.bytes):>10}  {self.reason}"


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The uses of memory, and what follows from them."""

    lines: tuple[Line, ...]
    block_size: int
    num_blocks: int
    max_model_len: int
    max_model_len_reason: str

    def concurrency(self, length: int) -> int:
        """Sequences of `length` tokens that fit at once."""
        return self.num_blocks // -(-length // self.block_size)

    def __str__(self) -> str:
        length = self.max_model_len
        return "\n".join(
            [
                *map(str, self.lines),
                f"{self.num_blocks} blocks of {self.block_size} = {self.num_blocks * self.block_size} tokens: "
                f"{self.concurrency(length)} sequences of {length} tokens, or {self.concurrency(-(-length // 8))} "
                f"of {-(-length // 8)}",
                f"max_model_len {length}: {self.max_model_len_reason}",
            ]
        )


def plan_memory(demand: Demand, *, available: int, default_share: float, limit: str | None) -> MemoryPlan:
    """Divide memory between weights, workspace and KV blocks.

    The pool never gets more blocks than `max_num_seqs` sequences of `max_model_len` could fill.
    Raises ConfigError when the weights or one full-length sequence do not fit.
    """
    budget, budget_reason = _budget(available, default_share, limit)
    workspace = (
        demand.max_num_batched_tokens * demand.workspace_bytes_per_token
        + demand.max_num_seqs * demand.workspace_bytes_per_seq
        + demand.scratch_bytes
    )
    length, length_reason = _max_model_len(demand)
    block_bytes = demand.block_size * demand.kv_bytes_per_token
    useful = demand.max_num_seqs * -(-length // demand.block_size)
    affordable = (budget - demand.weight_bytes - workspace) // block_bytes
    num_blocks = min(useful, affordable)
    if num_blocks * demand.block_size < length:
        if demand.max_model_len is not None or num_blocks * demand.block_size < 2:
            need = demand.weight_bytes + workspace + -(-length // demand.block_size) * block_bytes
            raise ConfigError(
                f"one sequence of {length} tokens needs {size(need)} (weights {size(demand.weight_bytes)}, workspace "
                f"{size(workspace)}, the rest KV), but the budget is {size(budget)}, {budget_reason}. Raise memory, or "
                "lower max_model_len, max_num_batched_tokens or max_num_seqs"
            )
        length = num_blocks * demand.block_size
        length_reason = f"lowered from {demand.model_max_len}, all that the KV memory can hold"
    why_kv = f"{num_blocks} blocks x {demand.block_size} tokens x {demand.kv_bytes_per_token} B ({demand.kv_reason})"
    why_kv += (
        f"; enough for {demand.max_num_seqs} sequences of {length}"
        if num_blocks == useful
        else f"; what is left of {size(budget)}, {budget_reason}"
    )
    lines = (
        Line("weights", demand.weight_bytes, demand.weight_reason),
        Line("KV pool", num_blocks * block_bytes, why_kv),
        Line(
            "workspace",
            workspace,
            f"{demand.max_num_batched_tokens} tokens a step x {size(demand.workspace_bytes_per_token)}, "
            f"{demand.max_num_seqs} rows x {size(demand.workspace_bytes_per_seq)}, "
            f"attention {size(demand.scratch_bytes)}",
        ),
    )
    return MemoryPlan(lines, demand.block_size, num_blocks, length, length_reason)


def parse_memory(text: str, available: int) -> float:
    """Bytes of '4GiB', '500MB' or '123456789'; a number up to 1 without a unit is a share of `available`."""
    match = _SIZE.fullmatch(text.strip())
    if not match or float(match[1]) == 0:
        raise ConfigError(
            f"memory must be bytes ('4GiB', '500MB', '123456789') or a share up to 1 ('0.5'), not {text!r}"
        )
    number, unit = float(match[1]), match[2].lower()
    return number * (available if number <= 1 and not unit else _UNITS[unit])


def size(num_bytes: float) -> str:
    """Bytes for people: '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def _budget(available: int, default_share: float, limit: str | None) -> tuple[int, str]:
    if limit is None:
        return int(
            available * default_share
        ), f"{default_share:.0%} of the {size(available)} available (memory not set)"
    asked = parse_memory(limit, available)
    if asked > available:
        raise ConfigError(f"memory={limit} is more than the {size(available)} available")
    return int(asked), f"memory={limit}"


def _max_model_len(demand: Demand) -> tuple[int, str]:
    if demand.max_model_len is None:
        return demand.model_max_len, "the model's own context"
    if not 2 <= demand.max_model_len <= demand.model_max_len:
        raise ConfigError(
            f"max_model_len must be between 2 and the model's {demand.model_max_len}, not {demand.max_model_len}"
        )
    return demand.max_model_len, "as asked"
