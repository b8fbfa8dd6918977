"""Asyncio client of one or more replicas: streams of requests, and calls.

A `Router` places each request on a replica. When an engine ends, its requests go on with the tokens
delivered so far (`OpenRequests`): on other replicas, or on the next engine of their own (`ReplicaRequests`). A request
that crashes one engine after the other is found by bisection and fails alone (`CrashBisection`). Requests and outputs
are token ids.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import msgspec

from quire.cache.key_report import KeyChanges
from quire.config import Routing
from quire.core.adapter import Adapter
from quire.core.explanation import Explanation
from quire.core.output import Output
from quire.core.request import Request, nth_seed
from quire.cost.step_time import CostFigures
from quire.errors import DeadlineUnreachable, EngineStopped, QueueFull, RequestError, refusal_of_all
from quire.fleet.crash_isolation import Crashes, Denylist
from quire.fleet.open_requests import OpenRequests
from quire.fleet.replica_requests import CRASH_MESSAGE, ReplicaRequests
from quire.fleet.request_keys import RequestKeys
from quire.fleet.routing import Router, RoutingStats, mean_costs
from quire.fleet.routing_journal import new_router
from quire.fleet.shuffle_shards import shard_of
from quire.fleet.stream import Stream, WholeAnswers
from quire.fleet.tenant_service import TenantService
from quire.monitor.update import Watcher
from quire.params import is_unicode
from quire.supervisor import protocol
from quire.supervisor.engine_handle import EngineHandle
from quire.supervisor.health import STALL_SECONDS, Health, combined
from quire.supervisor.restart_policy import RESTART_TIMEOUT
from quire.tenant_memory import TenantMemories

log = logging.getLogger(__name__)

_SHORT_SECONDS = 0.05  # for which a request may have waited for an engine without a note of it
COSTS_SECONDS = 5.0  # between two looks at the costs of steps
_MOVE_SECONDS = 0.05  # between two looks for requests that can move


class UnknownReplica(RequestError):
    """The fleet has no replica of this number."""


class LastReplica(RequestError):
    """A replica cannot be drained, because no other one serves."""


class ReplicaStatus(NamedTuple):
    """A replica as the front end sees it. num_requests: those that are placed on it. routed: None for the only one."""

    health: Health
    num_requests: int
    is_drained: bool
    routed: RoutingStats | None = None


class Fleet:
    """The engines of a server, across restarts. All methods must be called on the event loop of `start`.

    engine_handles: of the replicas, each with a launched engine. watchdog, restart_timeout: as in Replica. routing,
    journal: of the router of several replicas. shard_size: the number of replicas that each tenant uses; None: all.
    memories: the bytes that are held for each tenant.
    """

    def __init__(
        self,
        *engine_handles: EngineHandle,
        watchdog: float = 0.0,
        restart_timeout: float = RESTART_TIMEOUT,
        routing: Routing = "predicted",
        journal: BinaryIO | None = None,
        shard_size: int | None = None,
    ) -> None:
        self.open_requests = OpenRequests()
        self.crashes = Crashes()
        self.denylist = Denylist()
        self.pinned: dict[str, Adapter] = {}  # by digest
        self.memories = TenantMemories()
        self.tenant_service = TenantService()
        self._shard_size = shard_size
        self._streams: dict[str, Stream] = {}
        self._whole_answers: defaultdict[str, WholeAnswers] = defaultdict(WholeAnswers)  # by tenant
        self.engine_handles = engine_handles
        self._seed = engine_handles[0].model_info.options.seed
        self._num_requests = 0
        self._closing = False
        self._tasks: list[asyncio.Task[None]] = []
        self.router: Router | None = None  # None for one replica
        if len(engine_handles) > 1:
            self.router = new_router(routing, engine_handles, journal)
        self._request_keys = RequestKeys(engine_handles[0].model_info, engine_handles[0].share)
        numbers = range(len(engine_handles)) if len(engine_handles) > 1 else (None,)
        self.replicas = [
            ReplicaRequests(handle, self, watchdog=watchdog, restart_timeout=restart_timeout, number=number)
            for number, handle in zip(numbers, engine_handles, strict=True)
        ]
        for one in self.replicas:
            self.tenant_service.register(one)

    async def start(self) -> None:
        """Connect to the engines that the engine handles have launched, and supervise them."""
        await asyncio.gather(*(one.replica.start() for one in self.replicas))
        if self.router is not None:
            self._tasks = [
                asyncio.ensure_future(self._run_moves()),
                asyncio.ensure_future(self._learn_costs(self.router)),
            ]

    async def close(self) -> None:
        """End the engines after their current steps, or kill those whose step takes long. Open streams fail."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        self.tenant_service.close()
        await asyncio.gather(*(one.replica.close() for one in self.replicas))
        for one in self.replicas:
            one.close()
        if self.router is not None:
            self.router.close()

    @property
    def num_replicas(self) -> int:
        """Number of replicas."""
        return len(self.replicas)

    def check_replica(self, number: int) -> None:
        """Raises UnknownReplica for a number that no replica has."""
        self._replica(number)

    @property
    def failure(self) -> EngineStopped | None:
        """Why no engine is started any more; None while one serves or is restarted, and after `close`."""
        failures = [one.replica.failure for one in self.replicas]
        return None if None in failures else failures[0]

    def health(self) -> Health:
        """The health of all replicas together, as seen by the front end. The state is that of those not drained."""
        statuses = self.statuses()
        whole = combined([one.health for one in statuses])
        placed = [one.health for one in statuses if not one.is_drained]
        if len(placed) in (0, len(statuses)):
            return whole
        best = combined(placed)
        return whole._replace(problem=best.problem, state=best.state)

    def statuses(self) -> list[ReplicaStatus]:
        """The replicas, by number."""
        routed = [None] * len(self.replicas) if self.router is None else self.router.stats
        return [
            ReplicaStatus(one.replica.health(one.num_open), len(one.ids), one.is_drained, stats)
            for one, stats in zip(self.replicas, routed, strict=True)
        ]

    async def generate(self, requests: Sequence[Request], *, whole: bool = False) -> Stream:
        """Queue requests, all or none, of one tenant. Raises RequestError if one cannot be served, and EngineStopped.

        whole: their outputs are kept until all have come; then the stream must be released.
        """
        self._usable()  # raises if there is none
        ids = [request.id for request in requests]
        if any(request_id in self._streams for request_id in ids):
            raise RequestError("a request id is in use; choose another", "request_id")
        if not all(map(is_unicode, ids)):
            raise RequestError("a request id must be valid Unicode", "request_id")
        if any(request.params.logits_processors for request in requests):
            why = "logits_processors are functions, which cannot be sent to the engine process; use LLM"
            raise RequestError(why, "logits_processors")
        if any(request in self.denylist for request in requests):
            raise RequestError(CRASH_MESSAGE)
        requests = [self._seeded(request) for request in requests]
        tenant = requests[0].namespace.tenant
        answers = self._whole_answers[tenant] if whole else None
        stream = Stream(self.memories.of(tenant), partial(self._abort, ids), answers, ids)
        self._streams.update(dict.fromkeys(ids, stream))
        try:
            await self._add(requests)
        except BaseException:  # also when the caller is cancelled
            stream.release()
            raise
        return stream

    async def _add(self, requests: Sequence[Request]) -> None:
        """Have a replica queue requests. If it refuses them now, the tenant's next one is asked that takes requests.

        Raises the refusals of all that were asked as one.
        """
        began, tenant = time.monotonic(), requests[0].namespace.tenant

        def command(number: int) -> protocol.Add:
            waited = time.monotonic() - began
            if waited > _SHORT_SECONDS:  # for a restart, or on a replica that ended
                return protocol.Add(number, [msgspec.structs.replace(one, waited=waited) for one in requests])
            return protocol.Add(number, list(requests))

        refused: list[ReplicaRequests] = []
        refusals: list[QueueFull | DeadlineUnreachable] = []
        while True:
            home = self._choose(requests, refused, tenant)
            try:
                await home.add(requests, command)
            except (QueueFull, DeadlineUnreachable) as error:
                placed = self._home(requests[0].id) or home  # the requests may have moved
                refused += [home, placed]
                refusals.append(error)
                for request in requests:
                    placed.release_if_ended(request.id)
                if not any(one.takes_requests for one in self._usable(tenant) if one not in refused):
                    raise refusal_of_all(refusals) from None
            else:
                return

    def finish(self, request_id: str, index: int, num_tokens: int) -> None:
        """End a sequence at a stop string, after `num_tokens` output tokens."""
        home = self._home(request_id)
        seq_id = self.open_requests.finish(request_id, index, num_tokens)
        if home is None:
            return
        if seq_id is not None:
            home.finish(request_id, seq_id, num_tokens)
        elif request_id not in self.open_requests:  # the engine may have the request although it sent no output yet
            home.send(protocol.Abort([request_id]))
        home.release_if_ended(request_id)

    def end_program(self, tenant: str, program: str, branch: str | None = None) -> None:
        """End a branch of a program (None: all branches): no request will continue from it.

        Has no effect on a replica that restarts, because a new engine has no KV.
        """
        for one in self.replicas:
            one.send(protocol.EndProgram(tenant, program, branch))

    async def explain(self, request_ids: Iterable[str]) -> list[Explanation]:
        """Explanations of requests, without those that are unknown or ended too long ago. Raises EngineStopped.

        Of a request that has moved or was refused, the one of the replica on which it was placed last.
        """
        ids = list(request_ids)
        found: dict[str, tuple[Any, Explanation]] = {}
        homes = {home for name in ids if (home := self._home(name)) is not None}
        for one, some in await self._ask_all(lambda number: protocol.Explain(number, ids), homes):
            for explanation in some:
                name = explanation.request_id
                rank = (name in one.ids, explanation.state != "refused", explanation.arrived)
                if name not in one.given_ids and (name not in found or rank > found[name][0]):
                    found[name] = rank, explanation
        explained = [found[name][1] for name in ids if name in found]
        if self.router is None:
            return explained
        placements = self.router.placements
        return [msgspec.structs.replace(one, placement=placements.get(one.request_id)) for one in explained]

    async def flush_cache(self) -> int:
        """Evict cached KV that no running request uses. Returns the number of freed blocks. Raises EngineStopped."""
        return sum(freed for _, freed in await self._ask_all(protocol.Flush))

    async def read_adapter(self, name: str, path: str) -> Adapter:
        """Read and check the files of an adapter beside the steps. Raises ModelError and EngineStopped."""
        adapter: Adapter = await self._choose().call(lambda number: protocol.ReadAdapter(number, name, path))
        return adapter

    async def pin_adapter(self, adapter: Adapter, *, pinned: bool) -> None:
        """Load an adapter and keep it in memory, also in later engines, or let it leave again.

        Raises RequestError if it does not fit beside others that are pinned, and EngineStopped.
        """
        # at once: an engine that starts before the answers must pin it, or not pin it again
        is_new = pinned and adapter.digest not in self.pinned
        if pinned:
            self.pinned[adapter.digest] = adapter
        else:
            self.pinned.pop(adapter.digest, None)
        for one in self.replicas:
            if one.replica.has_engine and not one.replica.is_serving:  # stalled: it answers later, or ends
                one.pin(adapter, pinned=pinned)
        try:
            await self._ask_all(lambda number: protocol.PinAdapter(number, adapter, pinned))
        except BaseException as error:  # also when the caller is cancelled; other replicas may have pinned it
            if is_new and self.pinned.pop(adapter.digest, None) is not None:
                if isinstance(error, RequestError):
                    await self._ask_all(lambda number: protocol.PinAdapter(number, adapter, pinned=False))
                else:
                    for one in self.replicas:
                        one.pin(adapter, pinned=False)
            raise

    async def monitor_update(self, viewer: int, watcher: Watcher, num_seen: int, replica: int = 0) -> bytes:
        """The next Update of a viewer of a replica as JSON, once the engine has time for it. Raises EngineStopped.

        After a restart the engine knows no viewer, and returns the whole state.
        """
        update: bytes = await self._replica(replica).call(
            lambda number: protocol.MonitorUpdate(number, viewer, watcher, num_seen)
        )
        return update

    async def node(self, watcher: Watcher, node: int, replica: int = 0) -> bytes:
        """A node of a replica's radix trees as JSON; b"null" without one. See Engine.node. Raises EngineStopped."""
        detail: bytes = await self._replica(replica).call(lambda number: protocol.MonitorNode(number, watcher, node))
        return detail

    def forget_viewer(self, viewer: int, replica: int = 0) -> None:
        """A viewer has left. Has no effect during a restart, because a new engine knows no viewer."""
        self._replica(replica).send(protocol.ForgetViewer(viewer))

    async def cost_figures(self, replica: int = 0) -> CostFigures | None:
        """Figures of a replica's cost model; None if its engine does not answer within STALL_SECONDS."""
        try:
            figures: CostFigures = await asyncio.wait_for(self._replica(replica).call(protocol.AskCosts), STALL_SECONDS)
        except (EngineStopped, TimeoutError):
            return None
        return figures

    # Drains and restarts of replicas

    async def drain(self, number: int) -> None:
        """Move the requests of a replica to others, and place no more on it until it is restarted.

        Raises UnknownReplica, EngineStopped, and LastReplica if no other one serves.
        """
        home = self._replica(number)
        was_drained, home.is_drained = home.is_drained, True
        while True:
            self._usable()  # raises if there is none
            if not any(one.takes_requests for one in self.replicas):
                home.is_drained = was_drained and home.is_drained  # another drain of it may have ended so
                raise LastReplica(f"replica {number} is the last one that serves; drain it when another one does")
            if not home.is_drained:
                raise LastReplica(f"replica {number} was the last one that served; drain it again")
            self.relocate(home)
            if not home.ids:
                return
            await asyncio.sleep(_MOVE_SECONDS)  # suspects of a crash, and requests whose Add is not answered, stay

    async def restart(self, number: int) -> None:
        """Drain a replica, replace its engine, and wait until that serves.

        Raises UnknownReplica, LastReplica, and EngineStopped.
        """
        await self.drain(number)
        home = self._replica(number)
        try:
            await home.replica.restart()
        finally:
            home.is_drained = False

    # Calls of the replicas' requests, see RequestOwner

    def deliver(self, output: Output) -> Stream | None:
        """See RequestOwner."""
        stream = self._streams.get(output.request_id)
        if stream is None:
            return None
        if self.router is not None and (output.token_ids or (output.end is not None and not output.error)):
            self.router.record_first_token(output.request_id, time.monotonic())
        stream.put(output)
        return stream if stream.must_wait else None

    def on_turn(self, home: ReplicaRequests, keys: KeyChanges | None, num_counted: Mapping[str, int]) -> None:
        """See RequestOwner."""
        if self.router is None:
            return
        if keys is not None and (keys.added or keys.removed):
            self.router.update_keys(home.number, keys)
        for name, number in num_counted.items():
            self.router.record_progress(name, number)

    def on_cache_lost(self, home: ReplicaRequests) -> None:
        """See RequestOwner."""
        if self.router is not None:
            self.router.lose_cache(home.number)

    def on_removed(self, home: ReplicaRequests, request_id: str) -> None:
        """See RequestOwner."""
        if self.router is not None:
            self.router.remove(request_id, home.number, time.monotonic())

    def relocate(self, home: ReplicaRequests) -> None:
        """See RequestOwner. They stay while no other replica of their tenant serves."""
        others = [one for one in self.replicas if one is not home and one.takes_requests]
        if others and not self._closing:
            self._move(home, others)

    def on_stopped(self, home: ReplicaRequests, error: EngineStopped) -> None:
        """See RequestOwner. Requests that may be the cause, and all if this was the last replica, fail."""
        others = [one for one in self.replicas if one is not home and one.replica.error is None]
        if not self._closing and others:
            self._move(home, others)
            failed = {self._streams[name] for name in home.ids if name in self._streams}
        else:
            failed = set(self._streams.values())
        for stream in failed:
            stream.fail(error)
        home.fail(error)

    async def _learn_costs(self, router: Router) -> None:
        """Give the router the costs of steps that the engines have learned, while they run steps."""
        known = 0
        while True:
            await asyncio.sleep(COSTS_SECONDS)
            num_steps = sum(one.replica.num_steps for one in self.replicas)
            if num_steps == known:
                continue
            known = num_steps
            try:
                numbers = [one.number for one in self.replicas if one.replica.is_serving]
                found = await asyncio.gather(*map(self.cost_figures, numbers))
                router.set_costs(mean_costs([one for one in found if one is not None]))
            except Exception:  # the router goes on with what it knows
                log.exception("the costs of the engines could not be learned")

    async def _run_moves(self) -> None:
        """Move the requests of replicas that cannot go on with them, as soon as another one serves."""
        while True:
            await asyncio.sleep(_MOVE_SECONDS)
            for one in self.replicas:
                if one.ids and not one.takes_requests:
                    try:
                        self.relocate(one)
                    except Exception:  # the next look must come, or requests would wait for ever
                        log.exception("requests of a replica could not be moved")

    def _move(self, home: ReplicaRequests, others: Sequence[ReplicaRequests]) -> None:
        """Move what can be moved to those of `others` that its tenant uses, and to one that serves if any does."""

        def targets(request: Request) -> list[ReplicaRequests]:
            usable = self._usable(request.namespace.tenant)
            found = [one for one in others if one in usable]
            return [one for one in found if one.takes_requests] or found

        names = [name for name in home.movable if targets(self.open_requests.request(name))]
        calls = [call for call in home.movable_adds if targets(call.requests[0])]
        if not names and not calls:
            return
        log.info("%d requests and %d calls of a replica go on elsewhere", len(names), len(calls))
        for name in names:
            request, known = self.open_requests.request(name), self.open_requests.num_known(name)
            home.give(name, self._route([request], targets(request), num_known=known))
        for call in calls:
            home.give_add(call, self._route(call.requests, targets(call.requests[0])))
        for one in others:
            one.submit()

    # Replicas

    def _usable(self, tenant: str | None = None) -> list[ReplicaRequests]:
        """The replicas that serve or will, of a tenant's shard (None: all). Raises EngineStopped if there is none."""
        usable = [one for one in self.replicas if one.replica.error is None]
        if not usable:
            assert self.replicas[0].replica.error is not None
            raise self.replicas[0].replica.error
        if tenant is None or self._shard_size is None:
            return usable
        shard = shard_of(
            tenant,
            len(self.replicas),
            self._shard_size,
            has_failed=lambda number: self.replicas[number].replica.error is not None,
            is_drained=lambda number: self.replicas[number].is_drained,
        )
        return [self.replicas[number] for number in shard]

    def _choose(
        self,
        requests: Sequence[Request] = (),
        refused: Collection[ReplicaRequests] = (),
        tenant: str | None = None,
    ) -> ReplicaRequests:
        """Of the replicas that serve, or else of those that will, the one on which requests or a call are placed.

        refused: replicas that have refused the requests. tenant: whose replicas these are; None: any. Raises
        EngineStopped.
        """
        candidates = self._candidates(refused, tenant) or self._usable(tenant)
        ready = [one for one in candidates if one.takes_requests]
        # what waits for an engine can move; what a stalled one was sent cannot
        waiting = [one for one in candidates if not one.replica.has_engine]
        return self._route(requests, ready or waiting or candidates, has_arrived=not refused)

    def _route(
        self,
        requests: Sequence[Request],
        replicas: Sequence[ReplicaRequests],
        *,
        num_known: int = 0,
        has_arrived: bool = True,
    ) -> ReplicaRequests:
        """The one of the replicas on which the router places requests, all on one. They count there at once.

        num_known: output tokens of a request that moves. has_arrived: see Router. A call without requests goes to the
        one with the fewest.
        """
        if self.router is None or not requests:
            return min(replicas, key=lambda one: len(one.ids))
        allowed, now = list(replicas), time.monotonic()
        for routed in [self._request_keys.routed(request, num_known) for request in requests]:
            free = [one.replica.num_free_blocks for one in allowed]
            placed = self.router.place(routed, [one.number for one in allowed], free, now, has_arrived=has_arrived)
            allowed = [self.replicas[placed.replica]]
        return allowed[0]

    def _candidates(self, refused: Collection[ReplicaRequests], tenant: str | None) -> list[ReplicaRequests]:
        return [one for one in self._usable(tenant) if one not in refused and not one.is_drained]

    def _replica(self, number: int) -> ReplicaRequests:
        if not 0 <= number < len(self.replicas):
            raise UnknownReplica(f"there is no replica {number}; the replicas are 0 to {len(self.replicas) - 1}")
        return self.replicas[number]

    def _home(self, request_id: str) -> ReplicaRequests | None:
        """The replica on which a request is placed."""
        return next((one for one in self.replicas if request_id in one.ids), None)

    async def _ask_all(
        self, command: Callable[[int], Any], also: Collection[ReplicaRequests] = ()
    ) -> list[tuple[ReplicaRequests, Any]]:
        """The answers of all replicas that serve, and of `also`; without one, of the first that will serve.

        Those of `also` are waited for, across a restart if need be. Another engine that ends meanwhile gives no answer.
        Raises the first error of the others.
        """
        asked = [one for one in self.replicas if one.replica.is_serving or one in also]
        calls = (one.call(command, resend=one in also) for one in asked)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = []
        for one, answer in zip(asked, answers, strict=True):
            if not isinstance(answer, BaseException):
                found.append((one, answer))
            elif not isinstance(answer, EngineStopped):
                raise answer
        if not found:
            one = self._usable()[0]
            found.append((one, await one.call(command)))
        return found

    # Requests

    def _seeded(self, request: Request) -> Request:
        """The request with a seed, because another engine that continues it needs the same seed."""
        self._num_requests += 1
        if request.params.seed is not None:
            return request
        seed = nth_seed(self._seed, self._num_requests - 1)
        return msgspec.structs.replace(request, params=request.params.changed(seed=seed))

    def _abort(self, ids: Sequence[str]) -> None:
        known = [request_id for request_id in ids if self._streams.pop(request_id, None) is not None]
        for one in self.replicas:
            one.abort(known)
