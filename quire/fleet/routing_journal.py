"""The journal of a router: every input in call order, with every replica that was chosen.

The router is pure, so the same inputs give the same placements. `replay` gives the inputs to another router, and
reports the first difference.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from quire.cache.key_report import KeyChanges
from quire.config import Routing
from quire.core import codec
from quire.core.explanation import Placement
from quire.core.journal_file import JournalError, JournalFile, ReplayReport, read_journal
from quire.cost.step_time import CostFigures, CostModel
from quire.fleet.cached_keys import MOST_KEYS
from quire.fleet.routing import RoutedRequest, Router, RouterConfig, mean_costs
from quire.scheduler import journal
from quire.supervisor.engine_handle import EngineHandle

FORMAT = 1
_MOST_REPLICAS = 4096  # of a replay, which has a record for each


class Routes(msgspec.Struct, frozen=True, tag=True):
    """The first record: the arguments of the router."""

    format: int
    config: RouterConfig


class SetCosts(msgspec.Struct, frozen=True, tag=True):
    """`Router.set_costs`."""

    costs: CostFigures


class UpdateKeys(msgspec.Struct, frozen=True, tag=True):
    """`Router.update_keys`."""

    replica: int
    changes: KeyChanges


class LoseCache(msgspec.Struct, frozen=True, tag=True):
    """`Router.lose_cache`."""

    replica: int


class Place(msgspec.Struct, frozen=True, tag=True):
    """`Router.place`, with the replica and the prediction of its Placement."""

    request: RoutedRequest
    allowed: list[int]
    num_free: list[int]
    now: float
    replica: int
    predicted_seconds: float
    has_arrived: bool = True


class Progress(msgspec.Struct, frozen=True, tag=True):
    """`Router.record_progress`."""

    request_id: str
    num_done: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """`Router.record_first_token`."""

    request_id: str
    now: float


class Remove(msgspec.Struct, frozen=True, tag=True):
    """`Router.remove`."""

    request_id: str
    replica: int
    now: float


Record = Routes | SetCosts | UpdateKeys | LoseCache | Place | Progress | FirstToken | Remove


class JournalledRouter(Router):
    """A router that writes its inputs and choices to a journal."""

    def __init__(self, config: RouterConfig, file: BinaryIO) -> None:
        super().__init__(config)
        self._journal = JournalFile(file)
        self._write(Routes(FORMAT, config))

    def set_costs(self, costs: CostFigures) -> None:
        self._write(SetCosts(costs))
        super().set_costs(costs)

    def update_keys(self, replica: int, changes: KeyChanges) -> None:
        self._write(UpdateKeys(replica, changes))
        super().update_keys(replica, changes)

    def lose_cache(self, replica: int) -> None:
        self._write(LoseCache(replica))
        super().lose_cache(replica)

    def place(
        self,
        request: RoutedRequest,
        allowed: Sequence[int],
        num_free: Sequence[int],
        now: float,
        *,
        has_arrived: bool = True,
    ) -> Placement:
        placed = super().place(request, allowed, num_free, now, has_arrived=has_arrived)
        chosen = placed.replica, placed.predicted_seconds
        self._write(Place(request, list(allowed), list(num_free), now, *chosen, has_arrived))
        self._journal.flush()
        return placed

    def record_progress(self, request_id: str, num_done: int) -> None:
        self._write(Progress(request_id, num_done))
        super().record_progress(request_id, num_done)

    def record_first_token(self, request_id: str, now: float) -> bool:
        is_first = super().record_first_token(request_id, now)
        if is_first:  # other calls change nothing
            self._write(FirstToken(request_id, now))
        return is_first

    def remove(self, request_id: str, replica: int, now: float) -> None:
        if self.is_placed(request_id, replica):  # other calls change nothing
            self._write(Remove(request_id, replica, now))
        super().remove(request_id, replica, now)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()

    def _write(self, record: Record) -> None:
        self._journal.write(codec.encode(record))


def new_router(routing: Routing, engine_handles: Sequence[EngineHandle], file: BinaryIO | None) -> Router:
    """A router of replicas with launched engines. file: see JournalledRouter."""
    info, costs = engine_handles[0].model_info, CostModel()
    config = RouterConfig(
        routing=routing,
        num_replicas=len(engine_handles),
        block_size=info.cache.block_size,
        num_blocks=info.cache.groups[0].num_blocks,
        max_num_seqs=info.options.max_num_seqs,
        max_num_batched_tokens=info.options.max_num_batched_tokens,
        has_states=info.cache.states is not None,
    )
    router = Router(config) if file is None else JournalledRouter(config, file)
    if engine_handles[0].share.costs is not None:
        costs.calibrate(engine_handles[0].share.costs)
        router.set_costs(mean_costs([costs.figures()]))
    return router


def replay_journal(path: Path) -> ReplayReport:
    """Replay the journal of a router or of a scheduler, up to the first difference. Raises JournalError, OSError."""
    with path.open("rb") as file:
        try:
            is_of_router = isinstance(next(read_journal(file, Record), None), Routes)  # type: ignore[arg-type]
        except JournalError:
            is_of_router = False
        if is_of_router:
            file.seek(0)
            return replay(read_journal(file, Record))  # type: ignore[arg-type]
    return journal.replay_journal(path)


def replay(records: Iterator[Record]) -> ReplayReport:
    """Replay the inputs and compare the placements, up to the first difference. Raises JournalError."""
    header, number = next(records, None), 0
    if not isinstance(header, Routes):
        raise JournalError("not the journal of a router: it does not begin with its config")
    if header.format != FORMAT:
        raise JournalError(f"routing journal format {header.format} is not supported; this quire reads {FORMAT}")
    if not 0 < header.config.num_replicas <= _MOST_REPLICAS or header.config.most_keys > MOST_KEYS:
        raise JournalError(f"a replay has at most {_MOST_REPLICAS} replicas and {MOST_KEYS} keys")
    try:
        router = Router(header.config)
        for record in records:
            if not isinstance(record, Place):
                _apply(router, record)
                continue
            placed = router.place(
                record.request, record.allowed, record.num_free, record.now, has_arrived=record.has_arrived
            )
            if (placed.replica, placed.predicted_seconds) != (record.replica, record.predicted_seconds):
                recorded = f"replica {record.replica}, first token in {record.predicted_seconds!r} s"
                replayed = f"replica {placed.replica}, first token in {placed.predicted_seconds!r} s"
                difference = (
                    f"placement {number}, request {record.request.id}:\nrecorded: {recorded}\nreplayed: {replayed}"
                )
                return ReplayReport(number, difference, "placements")
            number += 1
    except JournalError:
        raise
    except Exception as error:  # records are untrusted, so they may cause any error
        raise JournalError(f"damaged after placement {number}: {type(error).__name__}: {error}") from error
    return ReplayReport(number, "", "placements")


def _apply(router: Router, record: Record) -> None:
    match record:
        case SetCosts(costs):
            router.set_costs(costs)
        case UpdateKeys(replica, changes):
            router.update_keys(replica, changes)
        case LoseCache(replica):
            router.lose_cache(replica)
        case Progress(request_id, num_done):
            router.record_progress(request_id, num_done)
        case FirstToken(request_id, now):
            router.record_first_token(request_id, now)
        case Remove(request_id, replica, now):
            router.remove(request_id, replica, now)
        case _:
            raise JournalError("a second header inside a journal")
