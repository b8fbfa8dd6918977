"""/v1/requests/{id}/explain: what became of a request and why. Knows who may ask; the reasons are the engine's."""

import msgspec
from fastapi import APIRouter, Request, Response

from quire.core.explanation import Explanation
from quire.server.api_keys import Caller
from quire.server.errors import UnknownRequest
from quire.server.middleware.auth import caller_of
from quire.server.service import Service

MAX_ID = 256  # characters; no id of this server is as long, and the names of many prompts are made of it


def explain_routes(service: Service) -> APIRouter:
    """The route of explanations."""
    router = APIRouter(tags=["Operations"])

    @router.get("/v1/requests/{id:path}/explain", response_model=None)  # clients' ids may have slashes
    async def explain(id: str, request: Request) -> Response:
        """What was reused, what not and why, what it waited for: of a request that runs or ran lately."""
        caller = caller_of(request)
        known = len(id) <= MAX_ID
        explanations = await service.explain(service.request_ids.answer_id(caller.tenant, id)) if known else []
        if not visible(explanations, caller):
            raise UnknownRequest(
                f"there is no request {id!r:.200}, or it ended long ago; give the id in the header x-request-id of "
                "its answer (on OpenAI's routes that is the answer's id, too)",
                "id",
            )
        prompts = [{**msgspec.structs.asdict(one), "saved_by_sharing": one.saved} for one in explanations]
        answer = {"id": id, "object": "request.explanation", "prompts": prompts}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router


def visible(explanations: list[Explanation], caller: Caller) -> bool:
    """Whether there is something, and nothing of another tenant's."""
    return bool(explanations) and all(caller.is_admin or one.tenant == caller.tenant for one in explanations)
