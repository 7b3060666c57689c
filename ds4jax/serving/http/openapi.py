"""`/openapi.json`: the whole API, as an OpenAPI 3.1 document that tools can read.

The schemas of bodies come from the very types that read them, so they cannot tell anything else than what the server takes.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
import orjson
from quart import Blueprint, Response

from ds4jax.serving.http.access import OPEN_PATHS
from ds4jax.serving.http.edge import Edge, json_response
from ds4jax.serving.http.openapi_operations import OPERATIONS, Operation
from ds4jax.serving.http.openapi_replies import SCHEMAS, Schema, ref
from ds4jax.serving.http.status import package_version
from ds4jax.serving.http.unsupported import UnsupportedFields

_OUR_MODULES = b"ds4jax.serving.http."  # msgspec spells out the module where several types have one name
_KEYS = {"bearer": {"type": "http", "scheme": "bearer"}, "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"}}
_ABOUT = (
    "DeepSeek V4 for many sessions at once, through the APIs of OpenAI and Anthropic. Fields of a request that are not listed are "
    "ignored; those that would change the reply and are not supported are refused by name."
)


def blueprint(edge: Edge) -> Blueprint:
    """Build the route over one edge."""
    routes = Blueprint("openapi", __name__)

    @routes.get("/openapi.json")
    async def openapi() -> Response:
        return json_response(document(needs_key=bool(edge.config.api_keys)))

    return routes


def document(*, needs_key: bool) -> dict[str, Any]:
    """Write the document. needs_key: the server was started with API keys."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, operation, needs_key and path not in OPEN_PATHS)
    schemas = {**_body_schemas(), **SCHEMAS, "Document": {"type": "object", "description": "An OpenAPI document."}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "ds4jax", "version": package_version(), "description": _ABOUT},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
    }


def _operation(method: str, path: str, operation: Operation, needs_key: bool) -> Schema:
    refusals = {**operation.refusals, **({401: "An API key is missing, or is none of this server's."} if needs_key else {})}
    described: Schema = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": re.sub("[^a-z0-9]+", "_", f"{method}_{path}".lower()).strip("_"),
        "responses": {"200": _reply(operation), **{str(status): _refusal(why, operation) for status, why in sorted(refusals.items())}},
        "security": [{name: []} for name in _KEYS] if needs_key else [],
    }
    if parameters := re.findall("{(.*?)}", path):
        described["parameters"] = [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in parameters]
    if operation.body is not None:
        content = {"application/json": {"schema": ref(operation.body.__name__)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _reply(operation: Operation) -> Schema:
    if operation.reply is None:
        return {"description": operation.summary, "content": {"text/plain": {"schema": {"type": "string"}}}}
    content: Schema = {"application/json": {"schema": ref(operation.reply)}}
    if operation.events is not None:
        content["text/event-stream"] = {"schema": _event(operation.events)}
    return {"description": operation.summary, "content": content}


def _event(schema: str) -> Schema:
    """Describe one event of a stream: readers of 3.1 documents that know streams take the schema for that of each event."""
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": ref(schema)}
    return {"type": "object", "properties": {"event": {"type": "string"}, "data": data}, "required": ["data"]}


def _refusal(why: str, operation: Operation) -> Schema:
    return {"description": why, "content": {"application/json": {"schema": ref(operation.error)}}}


def _body_schemas() -> dict[str, Schema]:
    """Describe the types that read bodies, and every type in them."""
    bodies = list({operation.body: None for operation in OPERATIONS.values() if operation.body is not None})
    _, components = msgspec.json.schema_components(bodies, ref_template=ref("{name}")["$ref"])
    schemas: dict[str, Schema] = orjson.loads(orjson.dumps(components).replace(_OUR_MODULES, b""))
    for body in bodies:
        for refused in _refused_fields(body):
            del schemas[body.__name__]["properties"][refused]
    return schemas


def _refused_fields(body: type[msgspec.Struct]) -> list[str]:
    """Name the fields that a body has only so that they can be refused: those that it does not declare anew."""
    if not issubclass(body, UnsupportedFields):
        return []
    own = {name for parent in body.__mro__ if parent is not UnsupportedFields for name in vars(parent).get("__annotations__", {})}
    return [name for name in UnsupportedFields.__struct_fields__ if name not in own]
