"""What operators and load balancers ask: is it alive, is it ready, what is it, how busy is it. None of it touches the engine's thread."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from quart import Blueprint, Response

from ds4jax.serving.http.edge import Edge, json_response
from ds4jax.serving.metrics import CONTENT_TYPE


def blueprint(edge: Edge) -> Blueprint:
    """Build the routes over one edge."""
    routes = Blueprint("status", __name__)

    @routes.get("/")  # Claude Code asks with HEAD whether anyone is there
    @routes.get("/live")
    async def live() -> Response:
        """Say no only when a restart alone can help."""
        alive = edge.engine.alive()
        return json_response({"status": "ok" if alive else "engine stopped"}, status=200 if alive else 503)

    @routes.get("/ready")
    async def ready() -> Response:
        """Say no as well while the server closes, so that new requests go elsewhere. A full queue is no reason: it empties by itself."""
        reason = edge.refusal
        return json_response({"status": "ok" if reason is None else reason}, status=200 if reason is None else 503)

    @routes.get("/health")
    async def health() -> Response:
        alive, stats = edge.engine.alive(), edge.engine.stats()
        slots = {"n_slots": stats.n_slots, "n_ctx": stats.n_ctx, "n_running": stats.n_running, "n_waiting": stats.n_waiting}
        return json_response({"status": "ok" if alive else "engine stopped", **slots}, status=200 if alive else 503)

    @routes.get("/metrics")
    async def metrics() -> Response:
        return Response(edge.metrics.render(), content_type=CONTENT_TYPE)

    @routes.get("/version")
    async def version() -> Response:
        return json_response({"version": package_version()})

    @routes.get("/server_info")
    async def server_info() -> Response:
        return json_response(_info(edge))

    @routes.get("/get_load")
    async def load() -> Response:
        """Answer as vllm-router asks, which looks for one number, `load`."""
        stats = edge.engine.stats()
        waiting = {"num_waiting_reqs": stats.n_waiting, "num_prefilling_reqs": stats.n_prefilling}
        return json_response({"load": stats.n_running + stats.n_waiting, **waiting, "num_slots": stats.n_slots})

    return routes


def package_version() -> str:
    """The version of the installed package; "unknown" for a source tree that was never installed."""
    try:
        return importlib.metadata.version("ds4jax")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _info(edge: Edge) -> dict[str, Any]:
    """Describe how the server was started, and what the engine has done. No keys, no paths, no text of requests."""
    stats, config = edge.engine.stats(), edge.config
    return {
        "version": package_version(),
        "started": edge.created,
        "models": edge.served_models,
        "strict_model": config.strict_model,
        "prompt_style": config.prompt_style,
        "default_max_tokens": min(config.default_max_tokens, stats.n_ctx),
        "body_limit_bytes": config.body_limit_bytes,
        "needs_api_key": bool(config.api_keys),
        "cors": config.cors,
        "engine": {
            "n_slots": stats.n_slots,
            "n_ctx": stats.n_ctx,
            "buckets": sorted(stats.steps),
            "occupancy": round(stats.occupancy, 4),
            "generated_tokens": stats.generated_tokens,
            "prefill_tokens": stats.prefill_tokens,
            "cached_tokens": stats.cached_tokens,
            "prefix_reuses": stats.reuses,
            "snapshots_taken": stats.snapshots,
            "failed_steps": stats.failed_steps,
            "compile_misses": stats.compile_misses,
        },
    }
