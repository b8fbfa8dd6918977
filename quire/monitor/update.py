"""An update: the state of the engine for one viewer, or what changed of it since the update before. Plain data.

docs/page.md describes the fields. Times are in seconds of the engine's clock.
"""

from typing import Literal, NamedTuple

import msgspec

from quire.scheduler.request_stats import Totals

Sees = Literal["all", "own"]
BlockRun = tuple[int, int, str]  # (pool, first block, run-length coded states)


class Watcher(msgspec.Struct, frozen=True):
    """The caller that an update is for. sees_all: it gets all tenants' data, not only that of `tenant`."""

    tenant: str
    sees_all: bool


class PoolFigures(msgspec.Struct, frozen=True):
    """Blocks of one KV group, or of recurrent states.

    num_free: for a viewer that sees only its own blocks, all others, free or not. block_size: tokens; 0 for blocks of
    states. Those that are idle are snapshots.
    """

    name: str
    block_size: int
    num_blocks: int
    num_free: int
    num_idle: int
    num_host_blocks: int
    num_host_used: int


class SequenceRow(msgspec.Struct, frozen=True, gc=False):
    """One unfinished sequence. seq: -1 for a request that waits for prerequisites.

    num_prompt_done: prompt tokens with KV, found in the prefix cache or computed; 0 for one that does not run. adapter:
    the name by which the request named it; empty for the model alone.
    """

    id: str
    seq: int
    state: Literal["running", "waiting", "swapped"]
    tenant: str
    mine: bool
    num_prompt: int
    num_prompt_done: int
    num_cached: int
    num_output: int
    max_tokens: int
    num_blocks: int
    since: float
    reason: str
    priority: int
    adapter: str
    owner: int


class Others(msgspec.Struct, frozen=True):
    """Counts of other tenants' sequences, if the viewer sees its own only: see `Load`."""

    running: int = 0
    waiting: int = 0


class NodeRow(NamedTuple):
    """A node of a radix tree. parent: -1 for a root. owner_kind: 0 reusable, 1 in use, 2 pinned."""

    id: int
    parent: int
    num_tokens: int
    num_blocks: int
    hits: int
    num_users: int
    last_used_at: float
    created_at: float
    owner_kind: int
    text: str  # of a root, for a viewer that sees all: its tenant
    num_snapshots: int  # its blocks with snapshots of recurrent states


class TreeChanges(msgspec.Struct, frozen=True):
    """Changed nodes; ids of nodes that were evicted, and of nodes that are not shown any more for another reason."""

    nodes: list[NodeRow]
    evicted: list[int]
    hidden: list[int]
    num_nodes: int
    shown: int


class StepRow(NamedTuple):
    """A step. Its tokens and sequences are those that the viewer may see; None: not known, or not for the viewer."""

    id: int
    at: float
    seconds_predicted: float | None
    seconds_measured: float | None
    prompt_tokens: int
    decode_tokens: int
    draft_tokens: int
    accepted_drafts: int
    num_seqs: int
    num_waiting: int | None
    preemptions: int | None
    evicted_blocks: int | None


class Update(msgspec.Struct, frozen=True):
    """The state (full), or what changed since the update before."""

    full: bool
    at: float
    now: float  # Unix time
    step: int
    sees: Sees
    pools: list[PoolFigures]
    blocks: list[BlockRun]
    host_blocks: list[BlockRun]
    requests: list[SequenceRow]
    others: Others
    num_running: int
    num_waiting: int
    tree: TreeChanges
    steps: list[StepRow]
    totals: Totals


class NodeDetail(msgspec.Struct, frozen=True):
    """One node of a radix tree with its first tokens. path_tokens: from its root to its end."""

    id: int
    token_ids: list[int]
    path_tokens: int
    hits: int
    created_at: float
    last_used_at: float
