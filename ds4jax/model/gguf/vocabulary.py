"""The vocabulary of a file that is about to be written: plain lists, as the GGUF keys hold them."""

from __future__ import annotations

from dataclasses import dataclass

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # values of tokenizer.ggml.token_type

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
SPECIAL_TOKENS = (BOS, EOS, PAD, "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜")


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level BPE vocabulary.

    tokens: in byte-mapped form, special ones as they read; merges: "left right", best first;
    rare: ids that random weights shall hardly ever choose (bytes that are no text by themselves).
    """

    tokens: tuple[str, ...]
    token_types: tuple[int, ...]
    merges: tuple[str, ...] = ()
    bos_id: int = 0
    eos_id: int = 1
    rare: frozenset[int] = frozenset()


def byte_alphabet() -> dict[int, str]:
    """Return the character that stands for each byte in a byte-level vocabulary (GPT-2's map).

    Printable bytes of Latin-1 stand for themselves, the rest for characters from U+0100 on, so a token never holds a blank.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + i) for i, byte in enumerate(others)}


def placeholder_vocabulary(n_vocab: int) -> Vocabulary:
    """Make a vocabulary of n_vocab tokens without merges: the special tokens, the 256 bytes, and names that no text contains.

    It encodes any text, byte by byte, so a model with random weights can be served and measured without the real vocabulary.
    """
    tokens = [*SPECIAL_TOKENS, *byte_alphabet().values()]
    tokens += [f"<placeholder {i}>" for i in range(len(tokens), n_vocab)]
    types = [CONTROL] * len(SPECIAL_TOKENS) + [NORMAL] * (len(tokens) - len(SPECIAL_TOKENS))
    return Vocabulary(tuple(tokens[:n_vocab]), tuple(types[:n_vocab]))
