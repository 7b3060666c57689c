"""Who may use the server: API keys, and pages of other origins."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from quart import Quart, Response, request

from ds4jax.errors import RequestError

CORS_HEADERS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "GET, POST, DELETE, OPTIONS",
    # A browser does not count Authorization among what the star allows.
    "Access-Control-Allow-Headers": "*, Authorization",
    "Access-Control-Expose-Headers": "*",
}

OPEN_PATHS = frozenset({"/", "/health", "/live", "/ready"})
"""What needs no key: load balancers and supervisors have none, and learn nothing there but whether the server works."""


class UnauthorizedError(RequestError):
    """The server was started with API keys, and the request carries none of them."""

    def __init__(self, given: bool) -> None:
        what = "the API key is not one of this server's" if given else "this server wants an API key"
        super().__init__(f"{what}; send one of its keys as `Authorization: Bearer KEY` or as `x-api-key: KEY`")


class ApiKeys:
    """The keys of one server. Comparing takes the same time whatever is sent, so it cannot be used to guess a key piece by piece."""

    def __init__(self, keys: Iterable[str]) -> None:
        # Digests have one length: comparing them tells nothing about the length of a key either.
        self._digests = [_digest(key) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def accept(self, given: str) -> bool:
        """Tell whether a key is one of ours; all of ours are compared, the matching one or not."""
        digest = _digest(given)
        return any([hmac.compare_digest(digest, own) for own in self._digests])


def add_access(app: Quart, keys: Iterable[str], *, cors: bool) -> None:
    """Answer OPTIONS on any path, ask for a key where the server has some, and let pages of other origins in if asked to."""
    own = ApiKeys(keys)

    @app.before_request
    async def admit() -> Response | None:
        if request.method == "OPTIONS":  # a browser's preflight carries no key
            return Response(status=204)
        if own and request.path not in OPEN_PATHS:
            given = _given_keys()
            if not any([own.accept(key) for key in given]):
                raise UnauthorizedError(bool(given))
        return None

    if cors:

        @app.after_request
        async def allow_all_origins(response: Response) -> Response:
            response.headers.update(CORS_HEADERS)
            return response


def _given_keys() -> list[str]:
    """Collect the keys of the current request: OpenAI's clients send one as a bearer token, Anthropic's in a header of its own."""
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    keys = [token.strip()] if scheme.lower() == "bearer" else []
    return [key for key in (*keys, request.headers.get("x-api-key", "")) if key]


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
