"""/v1/fleet: the replicas, their drains and their restarts."""

from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Path, Response

from quire.fleet.fleet import ReplicaStatus
from quire.server.middleware.auth import admins_only, same_origin_only
from quire.server.service import Service

MAX_NUMBER = 2**31 - 1  # that a request may name; a larger one is invalid, not unknown

Replica = Annotated[int, Path(ge=0, le=MAX_NUMBER, description="Number of a replica, from 0.")]


def fleet_routes(service: Service) -> APIRouter:
    """The routes, which need the role admin. Without keys every caller has it."""
    router = APIRouter(tags=["Operations"], dependencies=[Depends(admins_only)])

    @router.get("/v1/fleet", response_model=None)
    async def fleet() -> Response:
        """List the replicas: state, restarts, requests and KV of each engine."""
        return _json({"object": "list", "data": replica_entries(service.engine.statuses())})

    @router.post("/v1/fleet/{replica}/drain", dependencies=[Depends(same_origin_only)], response_model=None)
    async def drain(replica: Replica) -> Response:
        """Move the requests of a replica to others, and place no more on it until it is restarted.

        Returns the replica's entry once it has no request. 409 if no other replica serves.
        """
        await service.engine.drain(replica)
        return _json(replica_entries(service.engine.statuses())[replica])

    @router.post("/v1/fleet/{replica}/restart", dependencies=[Depends(same_origin_only)], response_model=None)
    async def restart(replica: Replica) -> Response:
        """Drain a replica, replace its engine, and place requests on it again.

        Returns the replica's entry once the new engine serves. 409 if no other replica serves.
        """
        await service.engine.restart(replica)
        return _json(replica_entries(service.engine.statuses())[replica])

    return router


def replica_entries(statuses: list[ReplicaStatus]) -> list[dict[str, object]]:
    """The entry of each replica for admins.

    `requests` is the number of requests that are placed on the replica. `requests_running` and `requests_waiting` count
    its sequences.
    """
    return [_entry(number, status) for number, status in enumerate(statuses)]


def _entry(number: int, status: ReplicaStatus) -> dict[str, object]:
    health, stats = status.health, status.health.stats
    age = health.heartbeat_age
    return {
        "object": "replica",
        "number": number,
        "state": health.state,
        "problem": health.problem or None,
        "restarts": health.num_restarts,
        "start_error": health.start_error or None,
        "drained": status.is_drained,
        "requests": status.num_requests,
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
        "kv_blocks_used": None if age is None else stats.kv_blocks_used,
        "kv_blocks_total": None if age is None else stats.kv_blocks_total,
        "heartbeat_age_seconds": None if age is None else round(age, 3),
    }


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
