"""/monitor: a stream of what the engine holds and does, and single nodes of its radix trees."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Path, Query, Request, Response

from quire.monitor.update import NodeDetail
from quire.server.api.native.fleet import MAX_NUMBER
from quire.server.errors import UnknownObject
from quire.server.held_answer import in_pieces
from quire.server.middleware.auth import caller_of
from quire.server.service import Service
from quire.server.sse import EventStream, StreamFormat, event, while_connected
from quire.server.viewers import Viewers, watcher_of

MAX_INTERVAL = 60.0  # seconds
MIN_INTERVAL = 0.1
_MAX_NODE = 2**53
_UPDATES = StreamFormat("text/event-stream", event)

Interval = Annotated[float, Query(ge=MIN_INTERVAL, le=MAX_INTERVAL, description="Least seconds between two updates.")]
NodeId = Annotated[int, Path(ge=0, le=_MAX_NODE, description="Id of a node in an update.")]
EngineNumber = Annotated[int, Query(ge=0, le=MAX_NUMBER, description="Number of the replica that is looked at.")]


def monitor_routes(service: Service, viewers: Viewers) -> APIRouter:
    """The routes. Callers without the role admin see what belongs to their tenant, and sums of the rest."""
    router = APIRouter(tags=["Operations"])
    decoder = msgspec.json.Decoder(NodeDetail | None)

    @router.get("/monitor", response_model=None)
    async def monitor(request: Request, interval: Interval = MIN_INTERVAL, engine: EngineNumber = 0) -> Response:
        """Stream requests, blocks, radix trees and steps: first all, then what changes. See docs/page.md."""
        caller = caller_of(request)
        caller.quota.count_request()
        viewing = viewers.admit(caller, engine)
        try:
            first = await while_connected(request.receive, viewing.update)
        except BaseException:  # also when the caller has left
            viewing.close()
            raise
        return EventStream(viewing.events(first, interval), viewing.close, _UPDATES)

    @router.get("/monitor/nodes/{node}", response_model=None)
    async def node(node: NodeId, request: Request, engine: EngineNumber = 0) -> Response:
        """Return one node of the radix trees with its tokens and their text."""
        caller = caller_of(request)
        caller.quota.count_request()
        detail = decoder.decode(await service.monitor_node(watcher_of(caller), node, engine))
        if detail is None:
            raise UnknownObject("node", str(node), "node")
        ids = [token for token in detail.token_ids if token < service.vocab_size]  # others are hashes of other content
        text = await service.thread_pool.run(caller.tenant, lambda: service.tokenizer.decode(ids))
        answer = {**msgspec.structs.asdict(detail), "text": text}
        response = Response(msgspec.json.encode(answer), media_type="application/json")
        return in_pieces(response, service.memories.of(caller.tenant))

    return router
