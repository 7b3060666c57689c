"""When a session is saved, and what is thrown away for it: ds4's policy as pure functions.

Four occasions: cold (the beginning that a new prompt may share with others), continued (a session grew by some thousand tokens), evict
(its slot goes to another) and shutdown. A state is saved only when the session stands exactly at the position.

Three things differ from ds4. A session that loses its slot and whose next prompt will lack its last thoughts is rewound to where these
began, where ds4 files the state, thoughts included, under a text without them. A cold prompt that is too short to be cut is saved one
token before its end, because a prompt's last token must be fed to get logits: saved whole it would never serve the same prompt again.
And a long session that was continued from disk is not deleted, but first in line when room is needed: another server may be asked to
continue it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ds4jax.config import KVPolicy
from ds4jax.serving.engine.kvstore.format import Reason

HALF_LIFE_S = 6 * 3600.0
_LEAST_HITS = 0.01


def chat_anchor(prompt: Sequence[int], user_token: int, assistant_token: int) -> int | None:
    """Return where the last user turn before the first answer begins: what precedes it is shared by many conversations."""
    first_answer = next((i for i, token in enumerate(prompt) if token == assistant_token), len(prompt))
    return next((i for i in range(first_answer - 1, -1, -1) if prompt[i] == user_token), None)


def cold_position(n_prompt: int, anchor: int | None, policy: KVPolicy) -> int | None:
    """Return after how many tokens a prompt of which nothing was found is to be saved; None: not at all.

    anchor: `chat_anchor`, if the prompt has one. Else the end is trimmed and the rest cut to a round length, if that is long enough.
    """
    if not policy.min_tokens <= n_prompt <= policy.cold_max_tokens:
        return None
    if anchor is not None and anchor >= policy.min_tokens:
        return min(anchor, n_prompt - 1)
    aligned = (n_prompt - policy.boundary_trim_tokens) // policy.boundary_align_tokens * policy.boundary_align_tokens
    position = aligned if aligned >= policy.min_tokens else n_prompt - 1
    # With no trim a prompt of a round length would be saved whole.
    position = min(position, n_prompt - 1)
    return position if position >= policy.min_tokens else None


def continued_due(n_live: int, n_saved: int, policy: KVPolicy) -> bool:
    """Whether a session of n_live tokens stands where it is saved again. n_saved: tokens at its last save of any kind, or 0."""
    step = policy.continued_step
    return step > 0 and n_live % step == 0 and n_live >= policy.min_tokens and n_live > n_saved


def next_continued(n_live: int, policy: KVPolicy) -> int | None:
    """Return the next position after n_live at which a session is saved again, so that a prefill can stop there."""
    step = policy.continued_step
    if not step:
        return None
    position = (n_live // step + 1) * step
    return position if position >= policy.min_tokens else -(-policy.min_tokens // step) * step


def worth_saving(n_live: int, policy: KVPolicy) -> bool:
    """Whether a session is saved when its slot is taken, or at shutdown."""
    return n_live >= policy.min_tokens


@dataclass(frozen=True, slots=True)
class Standing:
    """What decides whether a file stays. reason None: a file of another version, of which no more is known than its size.

    last_used_s: since 1970, None if unknown. extended: the session being saved begins with this one. long: beyond cold_max_tokens.
    """

    key: str
    size_bytes: int
    n_tokens: int = 0
    reason: Reason | None = None
    hits: int = 0
    last_used_s: float | None = None
    extended: bool = False
    long: bool = False


def score(file: Standing, now_s: float) -> float:
    """Return what a file is worth: tokens a byte, times one more than its hits, of which half are forgotten every six hours.

    What nobody will look for counts a twentieth, up to half where hits speak against that: an intermediate save of the session being
    saved, and a long session that was continued from here and will be saved again further on. All other saves that are not
    intermediate count double.
    """
    if file.reason is None:
        return -1.0  # goes first: nobody here can use it
    hits = 0.0
    if file.last_used_s is not None:
        # A clock of another host may be ahead.
        hits = file.hits * 2.0 ** (-max(now_s - file.last_used_s, 0.0) / HALF_LIFE_S)
        hits = hits if hits >= _LEAST_HITS else 0.0
    value = (hits + 1) * file.n_tokens / max(file.size_bytes, 1)
    went_on = file.long and file.hits > 0
    if went_on or (file.extended and file.reason is Reason.CONTINUED):
        return value * (0.05 + 0.45 * hits / (hits + 1))
    return value if file.reason is Reason.CONTINUED else 2 * value


def choose_victims(files: Iterable[Standing], room_bytes: int, now_s: float) -> list[Standing]:
    """Return the files to delete, worst first, until the others fit room_bytes. Among equals the one goes that was unused longest."""
    ranked = sorted(files, key=lambda f: (score(f, now_s), f.last_used_s or 0.0, f.key))
    excess = sum(file.size_bytes for file in ranked) - room_bytes
    victims = []
    for file in ranked:
        if excess <= 0:
            break
        victims.append(file)
        excess -= file.size_bytes
    return victims
