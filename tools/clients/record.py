"""What clients really send, and what they get."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


@dataclass
class Exchange:
    """One request and its reply. `path` has the query; `status` is 0 until the reply begins."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    reply: bytes = b""


class Recorder:
    """ASGI middleware that keeps every exchange, in the order in which they began."""

    def __init__(self, app: Callable[[Any, Receive, Send], Awaitable[None]]) -> None:
        self._app = app
        self.exchanges: list[Exchange] = []

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        query = scope["query_string"].decode()
        path = scope["path"] + (f"?{query}" if query else "")
        headers = {name.decode().lower(): value.decode("latin-1") for name, value in scope["headers"]}
        exchange = Exchange(scope["method"], path, headers)
        self.exchanges.append(exchange)

        async def received() -> Message:
            message = await receive()
            exchange.body += message.get("body", b"")
            return message

        async def sent(message: Message) -> None:
            exchange.status = message.get("status", exchange.status)
            exchange.reply += message.get("body", b"")
            await send(message)

        return await self._app(scope, received, sent)
