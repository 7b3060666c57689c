"""One choice of a reply: the events of its engine request, accounted for and turned into text and calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ds4jax.serving.engine.api import Event, Finish, FinishReason, GenerateRequest, Prefilled, Started, Token
from ds4jax.serving.http.call import Call
from ds4jax.serving.http.logprobs import Scored, scored
from ds4jax.serving.http.prompt_logprobs import PromptScores
from ds4jax.text.chat import complaint
from ds4jax.text.dsml import CallCollector, CallEvent, ReplayMemory, ToolCall
from ds4jax.text.segments import to_ids, to_text
from ds4jax.text.stream import Delta, TextStream
from ds4jax.text.tokenizer import Tokenizer

SHUTTING_DOWN = "the server is shutting down; send the request again later"


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a choice ended. stop_string: the one that was hit, if any; error: what to tell the client, where reason is "error"."""

    reason: Literal["stop", "length", "tool_calls", "error"]
    stop_string: str | None = None
    error: str | None = None


class Choice:
    """Counts, the ending, and the text stream that the tokens feed.

    n_prompt and n_cached are those of the request as the client sent it, however often the choice starts anew.
    """

    def __init__(self, tokenizer: Tokenizer, call: Call, index: int) -> None:
        self._tokenizer, self._call, self._request = tokenizer, call, call.requests[index]
        request, shown = self._request, call.scored_prompts
        self.prompt_scores = PromptScores(request, shown[index], tokenizer) if shown else None
        self.n_prompt, self.n_cached, self.n_generated, self.n_reasoning = len(request.prompt), 0, 0, 0
        if self.prompt_scores is not None:
            self.n_prompt = self.prompt_scores.n_prompt
        self.has_restarted = False
        self._begin()

    def _begin(self) -> None:
        use = self._call.tool_use
        self.ending: Ending | None = None
        self._tokens: list[int] = []
        self._scored: list[Scored] = []
        self._collector = CallCollector()
        self._parser = use.parser() if use else None
        self._text = TextStream(
            thinking=self._call.opens_reasoning,
            stops=self._call.stop_strings,
            tools=self._parser,
            opening=to_text(use.opening) if use else "",
        )

    @property
    def calls(self) -> list[ToolCall]:
        """The calls that are whole."""
        return self._collector.calls

    def take(self, event: Event) -> tuple[list[Delta], list[CallEvent]]:
        """Account for an event; sets `ending` when it is the last that matters."""
        match event:
            case Started():
                self.n_cached = self.n_cached if self.has_restarted else event.n_cached
                return [], []
            case Prefilled():
                return [], []
            case Token() if self.prompt_scores is not None and not self.prompt_scores.is_whole:
                self.prompt_scores.take(event)
                return [], []
            case Token():
                self.n_generated += 1
                self.n_reasoning += self._text.in_reasoning
                self._tokens.append(event.token)
                n_drawn = len(self._tokens) + (self.prompt_scores.n_drawn if self.prompt_scores else 0)
                may_stop = n_drawn > self._request.adjustments.min_tokens
                start = self._text.n_characters
                deltas = self._text.feed(self._tokenizer.token_bytes(event.token), may_stop=may_stop)
                if event.logprobs is not None:
                    end = self._text.n_characters + self._text.is_inside_character
                    self._scored.append(scored(event, event.logprobs, self._tokenizer, start, end))
            case Finish():
                deltas = self._text.finish(whole=event.reason is FinishReason.STOP)
        calls = self._text.take_calls()
        self._collector.take(calls)
        self.ending = self._ending_of_finish(event) if isinstance(event, Finish) else self._ending_of_text()
        return deltas, calls

    def take_scored(self) -> list[Scored]:
        """Return the log probabilities of tokens, each once, and none before its text can be sent."""
        if not self._scored:
            return []
        settled = self._text.n_settled if self.ending is None else self._text.n_characters + 1
        n = next((i for i, token in enumerate(self._scored) if token.end > settled), len(self._scored))
        taken, self._scored = self._scored[:n], self._scored[n:]
        start, end = self._text.content_span
        taken = [replace(token, is_content=token.start < end and token.end > start) for token in taken]
        if self.prompt_scores is not None:  # whose text stands before
            n = self.prompt_scores.n_characters
            taken = [replace(token, start=token.start + n, end=token.end + n) for token in taken]
        return taken

    def fail(self, error: str) -> None:
        """End the choice with an error that came from outside the engine's events."""
        self.ending = Ending("error", error=error)

    def remember_calls(self, memory: ReplayMemory) -> None:
        """Keep the very text of the calls that a choice ended with."""
        if self._parser is not None and (text := self._parser.block_text) is not None:
            memory.remember(text, self.calls)

    def second_try(self, n_ctx: int) -> GenerateRequest | None:
        """Ask the model once to write again a call that could not be read; None if there is nothing to write again, or no room."""
        reason = self.unreadable
        if reason is None or self.has_restarted:
            return None
        use = self._call.tool_use
        segments = complaint(reason, thinking=self._call.opens_reasoning) + (use.opening if use else [])
        prompt = (*self._request.prompt, *self._tokens, *to_ids(segments, self._tokenizer))
        room = n_ctx - len(prompt)
        most = self._request.max_tokens
        return replace(self._request, prompt=prompt, max_tokens=room if most is None else min(most, room)) if room > 0 else None

    def restart(self) -> None:
        """Forget text and ending, and begin anew."""
        self.has_restarted = True
        self._begin()

    @property
    def is_repaired(self) -> bool:
        """Whether calls lacked end tags and were read all the same."""
        return self._parser is not None and self._parser.was_repaired

    @property
    def unreadable(self) -> str | None:
        """Why calls could not be read, if that is all there is to a reply which the model itself has ended."""
        if self._parser is None or self.ending is None or self.calls or self._text.stop_hit is not None:
            return None
        return {"error": self._parser.error, "stop": self._text.rejected}.get(self.ending.reason)

    def _ending_of_text(self) -> Ending | None:
        if self._text.stop_hit is not None:
            return Ending("stop", stop_string=self._text.stop_hit)
        if not self._text.calls_ended:
            return None
        if len(self.calls) == self._collector.n_started:  # what broke behind whole calls does not make them worse
            return Ending("tool_calls")
        reason = self._parser.error if self._parser else None
        return Ending("error", error=f"the model wrote a tool call that cannot be read ({reason}); send the request again")

    def _ending_of_finish(self, finish: Finish) -> Ending:
        if finish.reason is FinishReason.ERROR:
            return Ending("error", error=finish.error or "generation failed")
        if finish.reason is FinishReason.CANCELLED:  # nobody but a closing server cancels what is still being read
            return Ending("error", error=finish.error or SHUTTING_DOWN)
        # A stop string that had waited for the end counts, and so do calls whose end tags were left out.
        return self._ending_of_text() or Ending("stop" if finish.reason is FinishReason.STOP else "length")
