"""The journal: every input of the scheduler in call order, with every planned Step.

The scheduler is pure, so the same inputs give the same Steps, byte for byte. `replay_journal` runs the inputs again
without a model and reports the first difference.

`JournalledScheduler` is a scheduler that records its calls. The file is flushed before `plan` returns a step, so that a
step that crashes the process is the last one in it.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from quire.cache.kv_cache import KVCache
from quire.cache.manager import KVCacheManager
from quire.config import CacheConfig, SchedulerConfig
from quire.core import codec, step
from quire.core.adapter import Adapter
from quire.core.constraint import EMPTY_VERDICT, NO_DRAFTS, AllowedDrafts, Constraints, Verdict
from quire.core.journal_file import JournalError, JournalFile, ReplayReport, read_journal
from quire.core.output import Output
from quire.core.request import CONSTRAINT, Request
from quire.core.step import Step, StepResult
from quire.cost.step_time import Calibration
from quire.errors import QuireError, RequestError
from quire.scheduler.scheduler import Scheduler


class RecordingConstraints:
    """Constraints that append their verdicts and allowed drafts to lists."""

    def __init__(self, constraints: Constraints, verdicts: list[Verdict], drafts: list[AllowedDrafts]) -> None:
        self._constraints = constraints
        self._verdicts = verdicts
        self._drafts = drafts

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._record(self._constraints.begin(seq_id, request, known))

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._record(self._constraints.advance(seq_id, tokens))

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self._constraints.end(seq_id)

    def allowed_drafts(self, seq_id: int, drafts: Sequence[int], most: int) -> AllowedDrafts:
        """See Constraints."""
        allowed = self._constraints.allowed_drafts(seq_id, drafts, most)
        self._drafts.append(allowed)
        return allowed

    def masks(self, seq_ids: Sequence[int], drafts: Sequence[AllowedDrafts]) -> np.ndarray:
        """See Constraints. Masks go to the runner only and are not recorded."""
        return self._constraints.masks(seq_ids, drafts)

    def _record(self, verdict: Verdict) -> Verdict:
        self._verdicts.append(verdict)
        return verdict


class ReplayedConstraints:
    """Constraints that return the recorded `verdicts` and `drafts` in order, then EMPTY_VERDICT and NO_DRAFTS."""

    def __init__(self) -> None:
        self.verdicts: deque[Verdict] = deque()
        self.drafts: deque[AllowedDrafts] = deque()

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._next()

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        return self._next()

    def end(self, seq_id: int) -> None:
        """See Constraints."""

    def allowed_drafts(self, seq_id: int, drafts: Sequence[int], most: int) -> AllowedDrafts:
        """See Constraints."""
        return self.drafts.popleft() if self.drafts else NO_DRAFTS

    def masks(self, seq_ids: Sequence[int], drafts: Sequence[AllowedDrafts]) -> np.ndarray:
        """Masks without words: a replay does not sample."""
        return np.zeros((len(seq_ids) + sum(len(one.tokens) for one in drafts), 0), np.uint32)

    def _next(self) -> Verdict:
        return self.verdicts.popleft() if self.verdicts else EMPTY_VERDICT


FORMAT = 12
_MOST_BLOCKS = 2**24  # of a replay, which has 17 bytes for each


class Header(msgspec.Struct, frozen=True, tag=True):
    """The first record: the arguments of the scheduler."""

    format: int
    scheduler: SchedulerConfig
    cache: CacheConfig
    is_constrained: bool = False  # whether it has Constraints


class Add(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.add`."""

    request: Request
    now: float


class Ready(msgspec.Struct, frozen=True, tag="Compiled"):  # the first prerequisite was a compiled constraint
    """`Scheduler.ready`, with the verdicts returned during the call."""

    request_id: str
    error: str
    now: float
    verdicts: list[Verdict]
    what: str = CONSTRAINT


class Refused(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.add`, with the RequestError that it raised."""

    request: Request
    now: float
    error: str


class AdapterLoaded(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.adapter_loaded`, with the verdicts returned during the call."""

    digest: str
    error: str
    now: float
    verdicts: list[Verdict]


class PinAdapter(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.pin_adapter`."""

    adapter: Adapter
    now: float
    pinned: bool


class Abort(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.abort`."""

    request_id: str
    now: float


class Finish(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.finish`."""

    seq_id: int
    num_tokens: int
    now: float


class EndProgram(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.end_program`."""

    tenant: str
    program: str
    branch: str | None
    now: float


class ServedElsewhere(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.served_elsewhere`."""

    service: dict[str, int]


class Flush(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.flush`."""

    now: float


class Calibrate(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.calibrate`."""

    calibration: Calibration


class Repair(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.repair`."""


class Plan(msgspec.Struct, frozen=True, tag=True):
    """`Scheduler.plan`, with the bytes of its Step, empty for None, and what constraints returned during the call."""

    now: float
    step: bytes
    drafts: list[AllowedDrafts] = []
    verdicts: list[Verdict] = []


class Commit(msgspec.Struct, frozen=True, tag=True, eq=False):
    """`Scheduler.commit`, with the verdicts returned during the call."""

    result: StepResult
    now: float
    verdicts: list[Verdict] = []


Input = (
    Add
    | Ready
    | Refused
    | AdapterLoaded
    | PinAdapter
    | Abort
    | Finish
    | EndProgram
    | ServedElsewhere
    | Flush
    | Calibrate
    | Repair
)
Record = Header | Input | Plan | Commit


class ReplayMismatch(QuireError):
    """A request that was rejected in the record is accepted in the replay, or rejected with another message."""


class JournalledScheduler(Scheduler):
    """A scheduler that writes its inputs and planned steps to a journal."""

    def __init__(
        self, config: SchedulerConfig, cache: KVCacheManager, file: BinaryIO, constraints: Constraints | None = None
    ) -> None:
        self._new_verdicts: list[Verdict] = []
        self._new_drafts: list[AllowedDrafts] = []
        recording = constraints
        if constraints is not None:
            recording = RecordingConstraints(constraints, self._new_verdicts, self._new_drafts)
        super().__init__(config, cache, recording)
        self._journal = JournalFile(file)
        self._write(Header(FORMAT, config, cache.config, constraints is not None))

    def add(self, request: Request, now: float) -> None:
        recorded = _without_processors(request)
        data = codec.encode(Add(recorded, now))  # encoded first: a request that cannot be encoded is not added
        try:
            super().add(request, now)
        except RequestError as error:
            self._write(Refused(recorded, now, str(error)))
            raise
        self._journal.write(data)

    def ready(self, request_id: str, what: str, error: str, now: float) -> bool:
        is_ready = super().ready(request_id, what, error, now)
        self._write(Ready(request_id, error, now, self._take_verdicts(), what))
        return is_ready

    def adapter_loaded(self, digest: str, error: str, now: float) -> None:
        super().adapter_loaded(digest, error, now)
        self._write(AdapterLoaded(digest, error, now, self._take_verdicts()))

    def pin_adapter(self, adapter: Adapter, now: float, *, pinned: bool) -> None:
        super().pin_adapter(adapter, now, pinned=pinned)
        self._write(PinAdapter(adapter, now, pinned))

    def abort(self, request_id: str, now: float) -> None:
        self._write(Abort(request_id, now))
        super().abort(request_id, now)

    def finish(self, seq_id: int, num_tokens: int, now: float) -> None:
        super().finish(seq_id, num_tokens, now)
        self._write(Finish(seq_id, num_tokens, now))

    def end_program(self, tenant: str, program: str, branch: str | None, now: float) -> None:
        self._write(EndProgram(tenant, program, branch, now))
        super().end_program(tenant, program, branch, now)

    def served_elsewhere(self, service: Mapping[str, int]) -> None:
        super().served_elsewhere(service)
        self._write(ServedElsewhere(dict(service)))

    def flush(self, now: float) -> int:
        self._write(Flush(now))
        return super().flush(now)

    def calibrate(self, calibration: Calibration) -> None:
        super().calibrate(calibration)
        self._write(Calibrate(calibration))

    def repair(self) -> None:
        self._write(Repair())
        super().repair()

    def plan(self, now: float) -> Step | None:
        planned = super().plan(now)
        self._write(Plan(now, _bytes(planned), list(self._new_drafts), self._take_verdicts()))
        self._new_drafts.clear()
        if planned is not None:
            self._journal.flush()  # the step may crash the process
        return planned

    def commit(self, result: StepResult, now: float) -> list[Output]:
        outputs = super().commit(result, now)
        self._write(Commit(result, now, self._take_verdicts()))
        return outputs

    def close(self) -> None:
        self._journal.close()

    def _take_verdicts(self) -> list[Verdict]:
        """Return and clear the verdicts since the last record."""
        heard = list(self._new_verdicts)
        self._new_verdicts.clear()
        return heard

    def _write(self, record: Record) -> None:
        self._journal.write(codec.encode(record))


def _without_processors(request: Request) -> Request:
    """The request without logits processors, which are functions. The scheduler has no use for them."""
    if not request.params.logits_processors:
        return request
    return msgspec.structs.replace(request, params=request.params.changed(logits_processors=()))


def read_records(file: BinaryIO) -> Iterator[Record]:
    """The records of a journal, see `read_journal`."""
    return read_journal(file, Record)  # type: ignore[arg-type]


def replay_steps(
    records: Iterator[Record],
    on_outputs: Callable[[list[Output]], None] = lambda _outputs: None,
    on_begin: Callable[[Scheduler], None] = lambda _scheduler: None,
) -> Iterator[tuple[Scheduler, Step | None, bytes]]:
    """Replay the inputs in a new scheduler. Yields (scheduler, its step, the recorded bytes) after each `plan`.

    on_outputs: called with the outputs of each `commit`. on_begin: called with the scheduler before its first input.
    Raises JournalError, and ReplayMismatch for a rejection that is not repeated with the same message.
    """
    num_steps = 0
    try:
        for replayed in _replayed(records, on_outputs, on_begin):
            yield replayed
            num_steps += replayed[1] is not None
    except (JournalError, ReplayMismatch):
        raise
    except Exception as error:  # records are untrusted, so they may cause any error
        raise JournalError(f"damaged after step {num_steps}: {type(error).__name__}: {error}") from error


def _replayed(
    records: Iterator[Record], on_outputs: Callable[[list[Output]], None], on_begin: Callable[[Scheduler], None]
) -> Iterator[tuple[Scheduler, Step | None, bytes]]:
    """See `replay_steps`. Records that do not fit each other may raise any error."""
    header = next(records, None)
    if not isinstance(header, Header):
        raise JournalError("not a quire journal: it does not begin with a header")
    if header.format != FORMAT:
        raise JournalError(f"journal format {header.format} is not supported; this quire reads format {FORMAT}")
    num_blocks = sum(group.num_blocks + group.num_host_blocks for group in header.cache.groups)
    if num_blocks > _MOST_BLOCKS:
        raise JournalError(f"its cache has {num_blocks} blocks; a replay has at most {_MOST_BLOCKS}")
    constraints = ReplayedConstraints()
    scheduler = Scheduler(header.scheduler, KVCache(header.cache), constraints if header.is_constrained else None)
    on_begin(scheduler)
    for record in records:
        if isinstance(record, Plan):
            constraints.drafts.extend(record.drafts)
            constraints.verdicts.extend(record.verdicts)
            yield scheduler, scheduler.plan(record.now), record.step
            continue
        if isinstance(record, Ready | AdapterLoaded | Commit):
            constraints.verdicts.extend(record.verdicts)
        if isinstance(record, Commit):
            on_outputs(scheduler.commit(record.result, record.now))
        else:
            _apply_record(scheduler, record)


def _apply_record(scheduler: Scheduler, record: Record) -> None:
    """Apply one record, other than a Plan or a Commit, to the scheduler."""
    match record:
        case Add(request, now):
            scheduler.add(request, now)
        case Ready(request_id, error, now, _, what):
            scheduler.ready(request_id, what, error, now)
        case AdapterLoaded() | PinAdapter():
            _apply_adapter_record(scheduler, record)
        case Refused():
            _replay_rejection(scheduler, record)
        case Abort(request_id, now):
            scheduler.abort(request_id, now)
        case Finish(seq_id, num_tokens, now):
            scheduler.finish(seq_id, num_tokens, now)
        case EndProgram(tenant, program, branch, now):
            scheduler.end_program(tenant, program, branch, now)
        case Flush(now):
            scheduler.flush(now)
        case ServedElsewhere() | Calibrate() | Repair():
            _apply_engine_record(scheduler, record)
        case Header():
            raise JournalError("a second header inside a journal")


def _apply_engine_record(scheduler: Scheduler, record: ServedElsewhere | Calibrate | Repair) -> None:
    match record:
        case ServedElsewhere(service):
            scheduler.served_elsewhere(service)
        case Calibrate(calibration):
            scheduler.calibrate(calibration)
        case Repair():
            scheduler.repair()


def _apply_adapter_record(scheduler: Scheduler, record: AdapterLoaded | PinAdapter) -> None:
    if isinstance(record, AdapterLoaded):
        scheduler.adapter_loaded(record.digest, record.error, record.now)
    else:
        scheduler.pin_adapter(record.adapter, record.now, pinned=record.pinned)


def _replay_rejection(scheduler: Scheduler, record: Refused) -> None:
    """Add a request that was rejected. Raises ReplayMismatch if it is not rejected with the same message."""
    said = ""
    try:
        scheduler.add(record.request, record.now)
    except RequestError as error:
        said = str(error)
    if said != record.error:
        replayed = f"rejected: {said}" if said else "accepted"
        raise ReplayMismatch(f"recorded:\nrejected: {record.error}\nreplayed:\n{replayed}")


def replay(records: Iterator[Record]) -> ReplayReport:
    """Replay the inputs and compare the steps with the recorded ones, up to the first difference.

    Raises JournalError for invalid records.
    """
    num_steps = 0
    try:
        for _, planned, expected in replay_steps(records):
            data = _bytes(planned)
            if data != expected:
                return ReplayReport(num_steps, _difference(num_steps, expected, data))
            num_steps += planned is not None
    except ReplayMismatch as error:
        return ReplayReport(num_steps, str(error))
    return ReplayReport(num_steps, "")


def replay_journal(path: Path) -> ReplayReport:
    """`replay` of a file. Raises JournalError, OSError."""
    with path.open("rb") as file:
        return replay(read_records(file))


def _bytes(planned: Step | None) -> bytes:
    return b"" if planned is None else step.to_bytes(planned)


def _difference(number: int, expected: bytes, planned: bytes) -> str:
    try:
        old, new = (str(step.from_bytes(data)) if data else "no step" for data in (expected, planned))
    except Exception as error:  # bytes that are untrusted, so they may cause any error
        raise JournalError(f"step {number} is damaged: {type(error).__name__}: {error}") from error
    if old == new:
        old, new = expected.hex(" ", 4), planned.hex(" ", 4)
    return f"recorded:\n{old}\nreplayed:\n{new}"
