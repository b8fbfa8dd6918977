"""Admin routes: metrics, server info, cache flush."""

import asyncio
from dataclasses import asdict

import msgspec
from fastapi import APIRouter, Depends, Response
from prometheus_client import CONTENT_TYPE_LATEST

from quire import __version__
from quire.config import CacheConfig
from quire.core.states import StateGroup
from quire.engine.engine import EngineStats
from quire.engine.shared_prefixes import num_public_blocks
from quire.server.middleware.auth import admins_only, same_origin_only
from quire.server.service import Service


def admin_routes(service: Service, metrics_prefix: str) -> APIRouter:
    """The routes that need the role admin. Without keys every caller has it."""
    router = APIRouter(tags=["Operations"], dependencies=[Depends(admins_only)])

    @router.get("/metrics", response_model=None)
    async def metrics() -> Response:
        """Metrics in Prometheus' text format."""
        return Response(service.metrics.export(metrics_prefix), headers={"content-type": CONTENT_TYPE_LATEST})

    @router.get("/server_info", response_model=None)
    @router.get("/get_server_info", response_model=None)
    async def get_server_info() -> Response:
        """Return version, model, options, KV groups, cache figures, load and measured costs."""
        count = service.engine.num_replicas
        costs = await asyncio.gather(*map(service.engine.cost_figures, range(count)))
        info = {**_server_info(service), "costs": costs[0]}
        if count > 1:
            info |= {"data_parallel_size": count, "costs_of_replicas": costs}
        return Response(msgspec.json.encode(info), media_type="application/json")

    @router.get("/load")
    async def load() -> dict[str, int]:
        """Return the number of running and waiting sequences, as vLLM's `server_load`."""
        stats = service.engine.health().stats
        return {"server_load": stats.num_running + stats.num_waiting}

    @router.get("/flush_cache", dependencies=[Depends(same_origin_only)])
    @router.post("/flush_cache", dependencies=[Depends(same_origin_only)])
    async def flush_cache() -> dict[str, int]:
        """Drop all cached KV that no running request uses."""
        return {"freed_blocks": await service.engine.flush_cache()}

    return router


def _server_info(service: Service) -> dict[str, object]:
    stats, states = service.engine.health().stats, service.cache.states
    return {
        "version": __version__,
        "model": service.model_name,
        "max_model_len": service.max_model_len,
        "options": asdict(service.options),
        **_memory(service.cache),
        "cache": _cache_figures(stats),
        **({} if states is None else {"states": _state_figures(states, stats)}),
        "swap": {
            "host_blocks_used": stats.host_blocks_used,
            "host_blocks_total": stats.host_blocks_total,
            "blocks_swapped_out": stats.num_swapped_out_blocks,
            "blocks_swapped_in": stats.num_swapped_in_blocks,
        },
        "requests_running": stats.num_running,
        "requests_waiting": stats.num_waiting,
    }


def _memory(cache: CacheConfig) -> dict[str, object]:
    groups = [
        {
            "kind": group.kind.name,
            "window": group.kind.span,
            "num_layers": len(group.layers),
            "dtype": group.dtype,
            "num_blocks": group.num_blocks,
            "bytes_per_block": group.bytes_per_block,
            "num_host_blocks": group.num_host_blocks,
        }
        for group in cache.groups
    ]
    return {
        "block_size": cache.block_size,
        "kv_groups": groups,
        "prefix_index": cache.prefix_index,
        "eviction": cache.eviction,
        "public_prefixes": {
            "count": len(cache.public_prefixes),
            "blocks": num_public_blocks(cache.public_prefixes, cache.block_size),
        },
    }


def _state_figures(states: StateGroup, stats: EngineStats) -> dict[str, object]:
    """The blocks of recurrent states, and their snapshots."""
    return {
        "kind": states.kind.rule,
        "num_layers": states.num_layers,
        "dtype": states.dtype,
        "num_blocks": states.num_blocks,
        "bytes_per_block": states.bytes_per_block,
        "num_host_blocks": states.num_host_blocks,
        "blocks_used": stats.state_blocks_used,
        "snapshots": stats.num_snapshots,
        "snapshots_evicted": stats.num_evicted_snapshots,
        "snapshot_hits": stats.num_snapshot_hits,
        "prompt_tokens_without_state": stats.num_stateless_tokens,
    }


def _cache_figures(stats: EngineStats) -> dict[str, float]:
    """Blocks are of all KV groups, tokens of prompts."""
    return {
        "kv_blocks_cached": stats.kv_blocks_cached,
        "kv_blocks_used": stats.kv_blocks_used,
        "kv_blocks_total": stats.kv_blocks_total,
        "kv_blocks_evicted": stats.kv_blocks_evicted,
        "prefix_query_tokens": stats.prefix_query_tokens,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
        "prefix_hit_rate": stats.prefix_hit_tokens / max(1, stats.prefix_query_tokens),
        "kv_tokens_copied": stats.kv_tokens_copied,
    }
