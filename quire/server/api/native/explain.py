"""/v1/requests/{id}/explain: the explanation of a request."""

from functools import partial

import msgspec
from fastapi import APIRouter, Request, Response

from quire.core.explanation import Explanation, Placement
from quire.server.api_keys import Caller
from quire.server.errors import UnknownRequest
from quire.server.held_answer import answer_in_turn
from quire.server.middleware.auth import caller_of
from quire.server.service import Service

EXPLANATION_BYTES = 2**20  # that count for the tenant while explanations are looked up
MAX_ID = 256  # characters; longer than any id of this server. One lookup key per possible prompt is built from it


def explain_routes(service: Service) -> APIRouter:
    """The route /v1/requests/{id}/explain."""
    router = APIRouter(tags=["Operations"])

    @router.get("/v1/requests/{id:path}/explain", response_model=None)  # client ids can contain slashes
    async def explain(id: str, request: Request) -> Response:
        """Explain cache reuse, queue time and preemptions of a request that runs or ended recently."""
        caller_of(request).quota.count_request()
        memory = service.memories.of(caller_of(request).tenant)
        return await answer_in_turn(memory, EXPLANATION_BYTES, partial(_explained, service, request, id))

    return router


async def _explained(service: Service, request: Request, id: str) -> Response:
    caller = caller_of(request)
    known = len(id) <= MAX_ID
    answer_id = service.request_ids.answer_id(caller.tenant, id)
    explanations = await service.explain(caller.tenant, answer_id) if known else []
    if not visible(explanations, caller):
        raise UnknownRequest(
            f"there is no request {id!r:.200}, or it ended long ago; give the id in the header x-request-id of "
            "its answer (on OpenAI's routes that is the answer's id, too)",
            "id",
        )
    prompts = [
        {**msgspec.structs.asdict(one), "saved_by_sharing": one.saved, "placement": _visible_placement(one, caller)}
        for one in explanations
    ]
    answer = {"id": id, "object": "request.explanation", "prompts": prompts}
    return Response(msgspec.json.encode(answer), media_type="application/json")


def _visible_placement(explanation: Explanation, caller: Caller) -> Placement | dict[str, object] | None:
    """The placement. Predicted seconds tell exactly how much other tenants have to compute: only an admin sees them."""
    placement = explanation.placement
    if placement is None or caller.is_admin:
        return placement
    matched = [{"replica": one.replica, "num_cached_tokens": one.num_cached_tokens} for one in placement.candidates]
    shown = {"replica": placement.replica, "routing": placement.routing, "actual_seconds": placement.actual_seconds}
    return {**shown, "candidates": matched}


def visible(explanations: list[Explanation], caller: Caller) -> bool:
    """Whether there are explanations and the caller may read all of them."""
    return bool(explanations) and all(caller.is_admin or one.tenant == caller.tenant for one in explanations)
