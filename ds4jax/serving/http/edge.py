"""What all routes of one app share: the engine, the tokenizer, and the calls that are open."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar, cast

import orjson
from hypercorn.typing import ASGIReceiveCallable, ASGIReceiveEvent, ASGISendCallable, Scope
from quart import Response, request

from ds4jax.config import ServerConfig
from ds4jax.errors import Ds4jaxError, EngineStoppedError, RequestError
from ds4jax.serving.engine.api import EngineClient
from ds4jax.serving.http import thinking
from ds4jax.serving.http.call import Call, ModelNotFoundError
from ds4jax.serving.http.choice import SHUTTING_DOWN
from ds4jax.serving.http.conversation import Served
from ds4jax.serving.http.generation import Generation
from ds4jax.serving.http.service import Postbox
from ds4jax.serving.http.strict_json import TOO_DEEP
from ds4jax.serving.http.trace import TraceFile
from ds4jax.serving.metrics import Metrics
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.grammar import GrammarCompiler
from ds4jax.text.template import ChatTemplate
from ds4jax.text.tokenizer import Tokenizer

T = TypeVar("T")

_CLIENT = "ds4jax.client"


class Edge:
    """The state of one app. memory: what the model wrote when it called tools, where others keep it too; else one of its own."""

    def __init__(self, engine: EngineClient, tokenizer: Tokenizer, config: ServerConfig, memory: ReplayMemory | None = None) -> None:
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self.metrics = Metrics(engine, config.model_id)
        self.memory = memory or ReplayMemory(config.tool_memory_max_ids)
        self._grammars = GrammarCompiler(tokenizer)
        source = config.chat_template
        self._template = None if source is None else ChatTemplate(source, tokenizer.special_literals)
        self._trace = TraceFile(config.trace, tokenizer) if config.trace is not None else None
        self.created = int(time.time())
        self._open: set[Generation] = set()
        self._box: Postbox | None = None
        self._closing = False

    @property
    def served(self) -> Served:
        """What a reader of bodies has to know."""
        return Served(self.tokenizer, self.engine.n_ctx, self.engine.n_ctx, self.config, self._grammars, self.memory, self._template)

    @property
    def served_models(self) -> tuple[str, ...]:
        """The ids that are listed."""
        return (self.config.model_id, *self.config.aliases)

    async def start(self, read: Callable[[bytes], Call]) -> Generation:
        """Read the body of the current request as a call, and submit it.

        The generation is closed when the client leaves or has its reply. Raises CancelledError if it has left already.
        """
        client: ClientConnection = cast(dict[str, Any], request.scope)[_CLIENT]
        body = await self._body()
        try:
            call = await asyncio.to_thread(_read, read, body)
            self.check_model(call.model)
            if conversation := request.headers.get("X-Session-Id"):
                call = replace(call, requests=[replace(one, conversation=conversation) for one in call.requests])
            if client.gone:
                raise asyncio.CancelledError
            if (refusal := self.refusal) is not None:
                raise EngineStoppedError(refusal)
            trace = self._trace.begin(call, body) if self._trace is not None else None
            generation = Generation(call, self.engine, self.tokenizer, self.metrics, self.memory, self._postbox(), trace)
        except Ds4jaxError as error:
            if self._trace is not None:
                self._trace.refused(request.path, body, error)
            raise
        self._open.add(generation)
        client.adopt(generation)
        return generation

    def _postbox(self) -> Postbox:
        """The one of the running loop, which all calls share."""
        loop = asyncio.get_running_loop()
        if self._box is None or self._box.loop is not loop:
            self._box = Postbox(loop)
        return self._box

    async def read_body(self, read: Callable[[bytes], T]) -> T:
        """Give the body of the current request to `read`; return or raise what that does.

        It runs in a worker thread: a long prompt takes longer to parse and encode than other streams may wait.
        """
        return await asyncio.to_thread(_read, read, await self._body())

    @staticmethod
    async def _body() -> bytes:
        encoding = request.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            name = "Content-Encoding"
            raise RequestError(f"{name}: got {encoding!r}, and this server unpacks nothing; send the body as it is", name)
        return cast(bytes, await request.get_data(as_text=False))

    @property
    def refusal(self) -> str | None:
        """Why no call can be taken now, or None if one can."""
        if self._closing:
            return SHUTTING_DOWN
        return None if self.engine.alive() else "the engine has stopped; restart the server"

    def check_model(self, model: str | None) -> None:
        """Refuse an unknown model if the server was started to be strict; else any name means the model that is loaded."""
        if self.config.strict_model and model is not None and model not in self.served_models and model not in thinking.ALIASES:
            raise ModelNotFoundError(model, self.served_models)

    def abort_all(self) -> None:
        """End every open call with an error that says the server closes, and refuse new ones."""
        self._closing = True
        for generation in self._open:
            generation.abort()

    def release(self, generation: Generation) -> None:
        """Close a generation whose reply has been sent, or whose client has gone."""
        generation.close()
        self._open.discard(generation)


class ClientConnection:
    """The client that one request came from, and the generations that work for it."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._generations: list[Generation] = []
        self.gone = False

    def adopt(self, generation: Generation) -> None:
        """Work for this client until it leaves."""
        self._generations.append(generation)

    def leave(self) -> None:
        """Free everything that works for this client."""
        self.gone = True
        for generation in self._generations:
            self._edge.release(generation)


class ReleaseAtEnd:
    """ASGI middleware that frees the slots of a request when its client leaves or its reply has been sent.

    This is the one place that does, because it is the one that sees every case: the client leaves before, during or between
    the parts of a reply; the handler fails; a body that is never iterated. The framework cancels the handler when a client leaves, but
    that cannot be relied upon: a cancellation that meets a wait which has just succeeded is lost (`asyncio.wait_for` before Python 3.12).
    """

    def __init__(self, app: Callable[..., Any], edge: Edge) -> None:
        self._app, self._edge = app, edge

    async def __call__(self, scope: Scope, receive: ASGIReceiveCallable, send: ASGISendCallable) -> None:
        client = ClientConnection(self._edge)
        cast(dict[str, Any], scope)[_CLIENT] = client

        async def watched_receive() -> ASGIReceiveEvent:
            event = await receive()
            if event["type"] == "http.disconnect":
                client.leave()
            return event

        try:
            await self._app(scope, watched_receive, send)
        finally:
            client.leave()


def _read(read: Callable[[bytes], T], body: bytes) -> T:
    """Read a body; one so deep that a part of it could be decoded and not be written again is told so."""
    try:
        return read(body)
    except RecursionError:
        raise RequestError(TOO_DEEP) from None


def json_response(body: Any, status: int = 200) -> Response:
    """Wrap a value as a JSON reply."""
    return Response(orjson.dumps(body), status=status, content_type="application/json")
