"""How far two sequences of tokens agree, or read alike, and where a prompt is worth a snapshot on its way. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

PARTS_OF_PROMPT = 4  # a long prompt is kept so many times on its way, or it would drive out the snapshots of everybody else


def common_prefix(a: Sequence[int], b: Sequence[int], most: int) -> int:
    """Count the leading tokens that two sequences of one type share, at most `most`.

    By halves, so that the comparing is done on slices, in C: sequences are long, and there is one for every slot.
    """
    low, high = 0, min(len(a), len(b), most)
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def reads_as(history: Sequence[int], prompt: Sequence[int], n_shared: int, texts: Sequence[bytes]) -> int | None:
    """Count the leading tokens of a prompt that together read as the whole history does; None if there are none, or none behind them.

    n_shared: tokens in which the two agree. texts: the text of each token, by id. Ends where the texts part, mostly at once.
    """
    old = new = b""  # what each has read ahead of the other; one of the two is always empty
    i = j = n_shared
    while i < len(history) or old or new:
        if not old and (new or i < len(history)):
            if i == len(history):
                return None
            old, i = texts[history[i]], i + 1
        else:
            if j == len(prompt) - 1:
                return None
            new, j = texts[prompt[j]], j + 1
        n = min(len(old), len(new))
        if old[:n] != new[:n]:
            return None
        old, new = old[n:], new[n:]
    return j


def plan_stops(n_prompt: int, n_cached: int, marks: Iterable[int], spacing: int) -> list[int]:
    """List where prefill of a prompt stops for a snapshot, ascending.

    Args:
        n_cached: tokens that are there already. marks: positions where other prompts are likely to part from this one, or have done.
        spacing: tokens that are computed again as fast as one, because the shortest chunk is padded to so many.

    The end of the prompt without its last token is the most useful place: whoever asks again returns to it, and so does the next turn of a
    conversation whose template drops the reasoning (which changes that last token, where the reasoning opens).
    """
    stops: list[int] = []
    last = n_cached
    for mark in sorted({*marks, n_prompt - 1}):
        if mark < n_prompt and mark - last >= spacing:
            stops.append(mark)
            last = mark
    return stops


def snapshot_interval(n_prompt: int, quantum: int) -> int:
    """Return after how many tokens the end of a chunk is worth a snapshot, wherever it falls."""
    return max(quantum, -(-n_prompt // PARTS_OF_PROMPT))
