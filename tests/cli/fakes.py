"""An engine that needs no model: it answers with the tokens it was given."""

from collections.abc import Callable, Sequence

from ds4jax.errors import QueueFullError
from ds4jax.serving.engine.api import EngineStats, Finish, FinishReason, GenerateRequest, Prefilled, Sink, Started, Token


class ScriptedEngine:
    """Deliver a fixed answer for every request, at once, on the caller's thread."""

    n_ctx = 4096

    def __init__(self, answer: Sequence[int], error: str | None = None, full: bool = False) -> None:
        self.answer, self.error, self.full = tuple(answer), error, full
        self.requests: list[GenerateRequest] = []
        self.cancelled: list[int] = []
        self.before_token: Callable[[], None] = lambda: None

    def submit(self, request: GenerateRequest, sink: Sink, n_more: int = 0) -> int:
        if self.full:
            raise QueueFullError(4)
        self.requests.append(request)
        request_id, n_prompt = len(self.requests), len(request.prompt)
        sink(Started(request_id, n_prompt, 0))
        sink(Prefilled(request_id, n_prompt, n_prompt))
        for token in self.answer:
            self.before_token()
            sink(Token(request_id, token))
        reason = FinishReason.ERROR if self.error else FinishReason.STOP
        sink(Finish(request_id, reason, n_prompt, 0, len(self.answer), self.error))
        return request_id

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def alive(self) -> bool:
        return True

    def close(self) -> None:
        pass
