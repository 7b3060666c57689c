"""Who lives in which slot, what the slots and the snapshots of them remember, and where a new prompt is put."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds4jax.serving.engine.prefix import common_prefix, reads_as
from ds4jax.serving.engine.session import Session, State
from ds4jax.serving.engine.snapshots import Found, SnapshotPool


class Choice(NamedTuple):
    """A free slot for a prompt. n_cached leading tokens are there already, or come with a snapshot.

    must_clear: empty it before anything else. snapshot: to be restored into the slot, with the compressed rows of the slot `source`
    (the slot itself: a rewind; another one, free or not: a fork). parts_at: tokens that the prompt has in common with what some slot
    holds, whether or not they can be used again: others may part from it there, too. n_retold: where the slot holds other tokens of the
    same text, how many tokens of the prompt they stand for.
    """

    slot: int
    n_cached: int
    must_clear: bool
    snapshot: int | None = None
    source: int | None = None
    parts_at: int = 0
    n_retold: int | None = None

    @property
    def n_covered(self) -> int:
        """Tokens of the prompt that need not be computed."""
        return self.n_cached if self.n_retold is None else self.n_retold

    @property
    def reuse(self) -> str | None:
        """Name what the prompt gains from: a slot continued as it was left ("live"), a "rewind", a "fork", or nothing."""
        if self.snapshot is None:
            return "live" if self.n_cached else None
        return "rewind" if self.source == self.slot else "fork"

    @property
    def n_kept(self) -> int:
        """Tokens of what the slot holds that stay."""
        return 0 if self.must_clear or self.source not in (None, self.slot) else self.n_cached


@dataclass(slots=True)
class _Slot:
    session: Session | None = None
    history: list[int] = field(default_factory=list)  # what may be continued; [] also when the contents cannot be trusted
    empty: bool = True  # at position 0: nothing to clear
    prompt_end: int = 0  # what follows in the history was generated
    conversation: str | None = None
    freed_at: int = 0  # order of releases, for the least recently used


class SlotTable:
    """Map slots to resident sessions and choose slots for new ones.

    spacing: tokens that are not worth keeping or waiting for: computing them costs the shortest chunk, as computing one does.
    texts: of the tokens, by id; without them prompts go on from their own tokens alone.
    """

    def __init__(self, n_slots: int, n_snapshots: int = 0, spacing: int = 1, texts: Sequence[bytes] = ()) -> None:
        self.spacing, self._texts = spacing, texts
        self._slots = [_Slot() for _ in range(n_slots)]
        self.snapshots = SnapshotPool(n_snapshots)
        self._releases = 0

    def __len__(self) -> int:
        return len(self._slots)

    def residents(self) -> Iterator[Session]:
        """Walk over the sessions that hold a slot, in slot order."""
        return (slot.session for slot in self._slots if slot.session is not None)

    # ------------------------------------------------------------ coming and going
    def choose(self, prompt: Sequence[int], conversation: str | None = None, *, retold: bool = True) -> Choice | None:
        """Choose a free slot for a prompt, or None when all are taken.

        What saves most of the prompt is taken: a free slot whose whole history begins the prompt, or a snapshot of any slot's
        beginning. Without either, one with nothing to lose, then the one that was left the longest ago. At least one token of
        the prompt is left to feed: the first logits come from it. A conversation with a name has nothing to lose in a slot of its own:
        it has been edited, or cut to fit, and will not come back to what is there. retold: whether other tokens of the same text will do.
        """
        free = [index for index, slot in enumerate(self._slots) if slot.session is None]
        if not free:
            return None
        shared = [self._n_shared(slot, prompt) for slot in self._slots]
        whole = [index for index in free if self._slots[index].history and shared[index] == len(self._slots[index].history)]
        live = min(whole, key=lambda index: (-shared[index], self._slots[index].freed_at), default=None)
        found = self.snapshots.find(shared)
        if live is not None and (found is None or found.position <= shared[live]):
            choice = Choice(live, shared[live], must_clear=False)
        elif found is not None:
            choice = self._return_to(found, free, conversation)
        else:
            index = min(free, key=lambda index: self._what_is_lost(index, conversation))
            choice = Choice(index, 0, must_clear=not self._slots[index].empty)
        if self._texts and retold:
            choice = max([choice, *self._retold(prompt, free, shared)], key=lambda choice: choice.n_covered)
        return choice._replace(parts_at=max(shared))

    def _retold(self, prompt: Sequence[int], free: Sequence[int], shared: Sequence[int]) -> Iterator[Choice]:
        """Find slots that go on as they were left with a prompt that was cut into other tokens than the model wrote."""
        for index in free:
            history = self._slots[index].history
            if self.spacing <= shared[index] < len(history):
                n = reads_as(history, prompt, shared[index], self._texts)
                if n is not None:
                    yield Choice(index, len(history), must_clear=False, n_retold=n)

    def _return_to(self, found: Found, free: Sequence[int], conversation: str | None) -> Choice:
        """Choose where a snapshot is restored: where nothing but a generated text is lost, else as for a new prompt.

        A conversation that goes on, or asks again, so stays in its slot; one that only begins like another leaves that one alone.
        """

        def loses_a_prompt(index: int) -> bool:
            return index not in found.homes or self._slots[index].prompt_end - found.position > self.spacing

        target = min(free, key=lambda index: (loses_a_prompt(index), *self._what_is_lost(index, conversation)))
        slot = self._slots[target]
        source = target if target in found.homes else min(found.homes)
        is_damaged = not slot.history and not slot.empty  # what lies behind the restored rows must at least be finite
        return Choice(target, found.position, is_damaged, found.entry, source)

    def _what_is_lost(self, index: int, conversation: str | None) -> tuple[bool, int, int]:
        slot = self._slots[index]
        return bool(slot.history) and not self.is_own(index, conversation), slot.freed_at, index

    def is_own(self, index: int, conversation: str | None) -> bool:
        """Whether a conversation was the last in a slot."""
        return conversation is not None and self._slots[index].conversation == conversation

    def take(self, choice: Choice, session: Session) -> None:
        """Give a chosen slot to a session."""
        self._slots[choice.slot].session = session
        if choice.snapshot is not None:
            assert choice.source is not None
            self.snapshots.touch(choice.snapshot, is_shared=choice.source != choice.slot)
            if choice.source != choice.slot:
                self.snapshots.fork(choice.source, choice.slot, choice.n_cached)
        self.snapshots.cut(choice.slot, choice.n_cached)

    def release(self, index: int, history: Sequence[int] | None) -> None:
        """Take a slot back. history: the tokens that were fed to it; None when its contents cannot be trusted."""
        session = self._slots[index].session
        assert session is not None
        if history is None:
            self.snapshots.distrust(index, session.n_cached)
            self.snapshots.cut(index, 0)
        prompt_end = len(history or ()) if session.is_manual else session.prompt_end
        self._releases += 1
        empty = history is not None and not history
        conversation = session.request.conversation if session.request else None
        self._slots[index] = _Slot(None, list(history or ()), empty, prompt_end, conversation, self._releases)

    def left(self, index: int) -> tuple[list[int], int]:
        """Return what a free slot holds, [] if that cannot be trusted, and how much of it was a prompt."""
        slot = self._slots[index]
        assert slot.session is None
        return slot.history, min(slot.prompt_end, len(slot.history))

    def rewind(self, index: int, position: int) -> None:
        """Note that a free slot went back to a position."""
        slot = self._slots[index]
        slot.history = slot.history[:position]
        self.snapshots.cut(index, position)

    def by_last_use(self) -> list[int]:
        """List the free slots, the one that was left last first."""
        free = [index for index, slot in enumerate(self._slots) if slot.session is None]
        return sorted(free, key=lambda index: -self._slots[index].freed_at)

    def forget(self) -> None:
        """Drop the histories of all free slots and all snapshots, because the cache behind them is lost."""
        self.snapshots.forget()
        for slot in self._slots:
            slot.history, slot.empty = [], False

    # ------------------------------------------------------------ sharing
    def keep(self, session: Session) -> int | None:
        """Find a place for a snapshot of a session as it is now; None if there is one of the same tokens already."""
        assert session.slot is not None

        def is_same(home: int) -> bool:
            return self._n_shared(self._slots[home], session.tokens[: session.n_fed + 1]) == session.n_fed

        is_shared = session.request is not None and session.n_fed in session.request.marks
        return self.snapshots.add(session.slot, session.n_fed, is_same, is_shared=is_shared)

    def builder_of(self, prompt: Sequence[int], n_cached: int) -> tuple[Session, int] | None:
        """Find a session that is computing more of a prompt than n_cached tokens, and up to where it will take a snapshot of it.

        It is asked for one where the two prompts part.
        """
        best: tuple[Session, int] | None = None
        for session in self.residents():
            if session.state is State.PREFILLING and not session.is_manual:
                n = common_prefix(prompt, session.tokens, min(len(prompt), session.prompt_end) - 1)
                if n - max(n_cached, session.n_fed) >= self.spacing:
                    stop = session.stop_before(n, self.spacing)
                    if stop - n_cached >= self.spacing and (best is None or stop > best[1]):
                        best = session, stop
        return best

    @staticmethod
    def _n_shared(slot: _Slot, prompt: Sequence[int]) -> int:
        """Count the tokens of a prompt with which a slot's contents begin, all but the last at most."""
        most = len(prompt) - 1
        if slot.session is None:
            return common_prefix(prompt, slot.history, most)
        return common_prefix(prompt, slot.session.tokens, min(most, slot.session.n_fed)) if slot.session.intact else 0
