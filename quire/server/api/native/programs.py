"""/v1/programs/end: the end of a program or of one branch."""

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from quire.core.scheduling_params import Program
from quire.errors import RequestError
from quire.server.middleware.auth import caller_of
from quire.server.request_params import RequestBody, optional_field
from quire.server.service import Service

_PREFIX = "program."  # of field names in Program's errors; this body has the fields at the top


class EndProgramBody(RequestBody):
    """POST /v1/programs/end."""

    id: str = Field(description="The program's id, as in its requests.")
    branch: str | None = optional_field("The branch to end; the whole program by default.")


def program_routes(service: Service) -> APIRouter:
    """The route /v1/programs/end."""
    router = APIRouter(tags=["Programs"], route_class=service.request_bodies.route_class())

    @router.post("/v1/programs/end", response_model=dict[str, str | None])
    async def end(body: EndProgramBody, request: Request) -> Response:
        """End a program or one branch of it: no later request continues from it, and its cached KV is evicted first.

        An unknown id, or one of another tenant, changes nothing and gets the same answer.
        """
        try:
            program = Program(id=body.id, branch=body.branch or "")
        except RequestError as error:
            raise RequestError(str(error).removeprefix(_PREFIX), str(error.param).removeprefix(_PREFIX)) from error
        branch = None if body.branch is None else program.branch
        service.engine.end_program(caller_of(request).tenant, program.id, branch)
        answer = {"object": "program.ended", "id": program.id, "branch": branch}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    return router
