"""The bound of the queue: how many requests may wait, and when there is room for one that was refused.

What is told is a place in a line: each one that is refused is told to come when those who wait, and those who were told
before it, have had their turn. No place is kept: whoever comes while there is room is taken in.
"""

from collections.abc import Iterator

from quire.cache.kv_cache import KVCache
from quire.config import SchedulerConfig
from quire.core.request import Request
from quire.cost.queue_wait import Lengths, Line, Machine, Turn, Turns, Work
from quire.cost.step_time import Costs
from quire.errors import QueueFull
from quire.scheduler.lifecycle import Lives
from quire.scheduler.sequence import Sequence

MOST_TOLD = 512  # that are expected to come: a flood does not make the line longer for ever
_UNKNOWN = 1.0  # seconds, where nothing is known of what steps take
_FRESH = 0.05  # share of the time told last, for which a forecast is good enough


class QueueBound:
    """Refuses requests while too many wait. Of those that have begun, or were accepted before, none is refused."""

    def __init__(self, config: SchedulerConfig, cache: KVCache, lives: Lives, costs: Costs) -> None:
        self._config = config
        self._cache = cache
        self._lives = lives
        self._costs = costs
        self._lengths = Lengths()
        self._told: dict[str, tuple[float, Turn]] = {}  # who was refused, and when it is to come
        self._line = Line(Turns(Machine(1, 1, 1.0, 0.0, 0.0), []), [], 0, 0)
        self._made, self._step, self._seconds = 0.0, -1, 0.0  # the line: when, before which step; told last

    def ended(self, seq: Sequence) -> None:
        """A sequence came to its end."""
        if seq.request.may_end_early:
            self._lengths.ended(seq.num_generated)

    def check(self, request: Request, step: int, now: float) -> None:
        """Raises QueueFull for one too many. One that finds nobody waiting is taken in, however long it is.

        step: the next one to be planned.
        """
        newcomers, config = self._lives.newcomers, self._config
        if request.was_accepted or not newcomers:
            return
        too_many = _above(len(newcomers) + 1, config.max_queued_requests)
        too_long = _above(newcomers.num_tokens + len(request.prompt), config.max_queued_tokens)
        if not (too_many or too_long):
            return
        seconds = self._wait(request, step, now)
        name = (
            "max_queued_requests" if too_many else "max_queued_tokens"
        )  # how many others there are is nobody's affair
        raise QueueFull(f"the queue is full ({name} {getattr(config, name)}); try again in {seconds:.3g} s", seconds)

    def add(self, request: Request, now: float) -> None:
        """One was taken in."""
        self._forget(request.id, now)
        if self._told:
            self._line.append(self._turn(request))
        else:
            self._step = -1  # nobody is told anything: the line is not kept up

    def _wait(self, request: Request, step: int, now: float) -> float:
        """Seconds until there is room for a request behind all in the line, where it is put."""
        if not self._costs.pace.per_token:
            return _UNKNOWN
        self._forget(request.id, now)
        if self._step < 0 or (step != self._step and now - self._made >= _FRESH * self._seconds):
            self._made, self._step = now, step
            newcomers, told = self._lives.newcomers, [turn for _, turn in self._told.values()]
            self._line = Line(
                self._turns(),
                self._who_waits(told),
                len(newcomers) + len(told),
                newcomers.num_tokens + sum(turn.num_tokens or 0 for turn in told),
            )
        most, tokens = self._config.max_queued_requests, self._config.max_queued_tokens
        self._seconds = self._line.seconds_until(
            0 if most is None else self._line.num_requests + 1 - most,
            0 if tokens is None else self._line.num_tokens + len(request.prompt) - tokens,
        )
        at = max(self._made + self._seconds, now) + self._costs.step_seconds
        if len(self._told) < MOST_TOLD:
            self._told[request.id] = at, self._turn(request)
            self._line.append(self._told[request.id][1])
        return at - now

    def _forget(self, request_id: str, now: float) -> None:
        """Who has come, and those who should have."""
        if request_id in self._told:
            self._line.drop(self._told.pop(request_id)[1])
        while self._told and next(iter(self._told.values()))[0] <= now:
            self._line.drop(self._told.pop(next(iter(self._told)))[1])

    # What the forecast is made from

    def _turns(self) -> Turns:
        """The machine, and who runs on it."""
        pace, config, pools = self._costs.pace, self._config, self._cache.pools
        groups = [i for i, group in enumerate(self._cache.config.groups) if not group.window]
        room = min(
            ((pools[i].num_blocks - self._lives.spare[i]) * self._cache.block_size for i in groups),
            default=float("inf"),
        )
        budget = pace.tokens_within(config.step_seconds, config.max_num_batched_tokens)
        machine = Machine(config.max_num_seqs, budget, room, pace.fixed, pace.per_token)
        return Turns(machine, self._who_runs())

    def _who_runs(self) -> list[Work]:
        """What each still has to do. Of those whose end nobody knows, one ends after the other.

        As if their ends came at random: of U the first is expected after 1 / U of the mean length, the next one
        1 / (U - 1) of it later.
        """
        works, running = [], self._lives.rows.running
        num_unsure, share = sum(seq.request.may_end_early for seq in running), 0.0
        for seq in running:
            if seq.request.may_end_early:
                share += 1 / num_unsure
                num_unsure -= 1
            length = len(seq.tokens)
            works.append(Work(max(0, length - seq.num_computed), self._outputs(seq, share), length))
        return works

    def _who_waits(self, told: list[Turn]) -> Iterator[Turn]:
        """Who came first is first, whatever the policy; then those who were told to come. As they are now."""
        newcomers = self._lives.newcomers
        waiting = [(seq, seq.request.id in newcomers) for seq in self._lives.sequences.values() if seq.row < 0]
        return self._each(waiting, told)

    def _each(self, sequences: list[tuple[Sequence, bool]], told: list[Turn]) -> Iterator[Turn]:
        before = ""
        for seq, new in sequences:
            first = seq.request.id != before
            before = seq.request.id
            yield Turn([self._work(seq, first=first)], len(seq.request.prompt) if first and new else None)
        yield from told

    def _turn(self, request: Request) -> Turn:
        """Of one that is not there yet."""
        sequences = [Sequence(-1, request, i, 0.0) for i in range(request.num_sequences)]
        return Turn([self._work(seq, first=seq.index == 0) for seq in sequences], len(request.prompt))

    def _work(self, seq: Sequence, *, first: bool) -> Work:
        """Of one that waits. The first of a request computes what all of them share."""
        accounts = self._lives.accounts
        new = len(seq.tokens) - (0 if first else seq.num_shared)
        if first and not seq.has_begun:
            new -= int(len(seq.request.prompt) * accounts.num_hit_tokens / max(1, accounts.num_query_tokens))
        return Work(1 if seq.swapped else max(1, new), self._outputs(seq, 1.0), new)

    def _outputs(self, seq: Sequence, share: float) -> float:
        """Tokens that a sequence is expected to generate yet. share: of the mean length, where its end is not known."""
        most, mean = max(0, seq.end - len(seq.tokens)), self._lengths.mean
        if mean is None or not seq.request.may_end_early:
            return most
        return min(most, max(share * mean, seq.min_length - len(seq.tokens)))


def _above(number: int, bound: int | None) -> bool:
    return bound is not None and number > bound
