"""Vocabularies for synthetic models: a small one learnt from a page of English, or that of a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from ds4jax.errors import TokenizerError
from ds4jax.model.gguf.vocabulary import CONTROL, NORMAL, SPECIAL_TOKENS, USER_DEFINED, Vocabulary, byte_alphabet

_PRACTICE_TEXT = """
The sun came up over the little town, and the people opened their doors and their windows. A small boy ran down the road to the
river with his dog. He wanted to see the boats that were coming in from the sea. His mother called after him: "Do not stay too long!
There is bread on the table, and we are going to visit your grandmother today." The boy laughed and said that he would be back before
the water was hot. At the river he found an old man who was mending a net. "What are you looking for?" asked the old man. "I am
looking for the big white ship," said the boy. "It will be here soon," the man answered, "but the wind is not strong this morning, so
you must wait a little." They sat together on the stones and talked about the stars, the fish, and the places where the ships had
been. When the white ship came around the hill at last, the boy stood up and waved with both hands, and someone on the ship waved back.
That was the best thing he had ever seen. He thanked the old man, took his dog, and ran home to tell his mother everything.

A computer follows instructions one after another. It can add numbers, compare words, and remember what it has been told. A program is
a list of such instructions, written by a person who knows what the machine should do. Some programs learn from examples: they read
many sentences and try to guess which word comes next. When the guess is wrong they change a little, and after many changes the guesses
get better. This is how a language model works. It does not know the world as we do, but it can write a letter, answer a question,
explain how something is made, or help with other things that can be put into words. It is good to check what it says, because a text
can sound right and still be wrong. Please think about the question before you give the answer, and say so when you are not sure.
"""


def train_small_vocabulary(n_vocab: int) -> Vocabulary:
    """Learn a byte-level vocabulary of n_vocab tokens from the page above; deterministic.

    Raises TokenizerError where the page does not hold enough different words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    bytes_first = list(byte_alphabet().values())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    n_learnt = n_vocab - len(SPECIAL_TOKENS)
    trainer = trainers.BpeTrainer(vocab_size=n_learnt, initial_alphabet=bytes_first, show_progress=False)
    tokenizer.train_from_iterator(_PRACTICE_TEXT.split("\n\n"), trainer)
    merges = tuple(" ".join(pair) for pair in json.loads(tokenizer.to_str())["model"]["merges"])
    tokens = (*SPECIAL_TOKENS, *bytes_first, *(merge.replace(" ", "") for merge in merges))
    if len(tokens) != n_vocab or len(set(tokens)) != n_vocab:
        raise TokenizerError(f"cannot learn {n_vocab} tokens from the practice text, got {len(set(tokens))}; ask for fewer")
    types = (CONTROL,) * len(SPECIAL_TOKENS) + (NORMAL,) * n_learnt
    rare = frozenset(i for i, token in enumerate(tokens) if i != 1 and _is_no_text(token))
    return Vocabulary(tokens, types, merges, rare=rare)


def _is_no_text(token: str) -> bool:
    """Whether a token shows nothing readable by itself: special, a control character, or a piece of a longer character."""
    return token in SPECIAL_TOKENS or (len(token) == 1 and not token.isascii() and token not in "ĠĊ")


def read_vocabulary(path: Path, n_vocab: int) -> Vocabulary:
    """Read the vocabulary of a tokenizer.json (byte-level BPE, such as DeepSeek's), filled up to n_vocab tokens.

    Raises TokenizerError naming the file and what it lacks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids: dict[str, int] = dict(content["model"]["vocab"])
        merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"])
        added = {entry["content"]: (entry["id"], bool(entry["special"])) for entry in content["added_tokens"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"{path}: not a byte-level BPE tokenizer.json ({type(error).__name__}: {error})") from error
    ids |= {token: i for token, (i, _) in added.items()}
    if max(ids.values()) >= n_vocab:
        raise TokenizerError(f"{path}: its largest token id is {max(ids.values())}, but the model has {n_vocab} tokens")
    tokens = [f"<placeholder {i}>" for i in range(n_vocab)]
    types = [NORMAL] * n_vocab
    for token, i in ids.items():
        tokens[i] = token
    for i, special in added.values():
        types[i] = CONTROL if special else USER_DEFINED
    return Vocabulary(tuple(tokens), tuple(types), merges, tokens.index(SPECIAL_TOKENS[0]), tokens.index(SPECIAL_TOKENS[1]))
