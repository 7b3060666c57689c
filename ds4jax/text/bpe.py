"""Byte-level BPE as DeepSeek V4 splits it, built on the `tokenizers` library.

Ids must equal those of the model's own tokenizer.json, so the three splitting patterns are that file's, applied one after
the other: each cuts only the pieces that the one before left whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

SPLITS = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
        r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
)
"""Up to three digits; runs of CJK and kana; then words, punctuation and white space."""


def _byte_letters() -> dict[str, int]:
    """letter -> byte. Printable Latin-1 bytes are their own letter; the rest take U+0100 and up, in order (GPT-2's map)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTE_OF_LETTER = _byte_letters()


def build_model(id_of: Mapping[str, int], merges: Iterable[str]) -> models.BPE:
    """Build the merging model; several encoders may share it, since added tokens live outside it."""
    left_right = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    return models.BPE(vocab=dict(id_of), merges=left_right)


def build_encoder(model: models.BPE, added: Sequence[str]) -> Tokenizer:
    """Build an encoder that matches the literals in `added` first, then splits and merges what lies between."""
    encoder = Tokenizer(model)
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS]
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    encoder.add_tokens([AddedToken(literal, normalized=False) for literal in added])
    return encoder
