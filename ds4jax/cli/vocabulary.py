"""Vocabularies for synthetic models: a small one learnt from a page of English, or that of a tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from ds4jax.errors import TokenizerError
from ds4jax.text.bpe import BYTE_OF_LETTER
from ds4jax.text.special import ASSISTANT, BOS, DSML, END_THINK, EOS, THINK, USER
from ds4jax.text.vocabulary import CONTROL, USER_DEFINED, Vocabulary

NORMAL, UNUSED = 1, 5  # further values of tokenizer.ggml.token_type
SPECIAL_TOKENS = (BOS, EOS, "<｜▁pad▁｜>", USER, ASSISTANT, THINK, END_THINK, DSML)

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


def learn_vocabulary(n_vocab: int, n_learnt: int = 640) -> Vocabulary:
    """Make a byte-level vocabulary of n_vocab tokens, the first n_learnt of them learnt from the page above; deterministic.

    The rest are placeholders that no text contains. It stands in for the real vocabulary, which is not always at hand.
    Raises TokenizerError where the page does not hold enough different words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    letters = list(BYTE_OF_LETTER)
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    size = n_learnt - len(SPECIAL_TOKENS)
    learner.train_from_iterator(
        _PRACTICE_TEXT.split("\n\n"), trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    )
    merges = tuple(" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"])
    tokens = (*SPECIAL_TOKENS, *letters, *(merge.replace(" ", "") for merge in merges))
    if len(tokens) != n_learnt or n_learnt > n_vocab:
        raise TokenizerError(f"cannot learn {n_learnt} tokens of {n_vocab} from the practice text, got {len(tokens)}; ask for fewer")
    types = (CONTROL,) * len(SPECIAL_TOKENS) + (NORMAL,) * size
    n_unused = n_vocab - n_learnt
    return Vocabulary(
        (*tokens, *map(_placeholder, range(n_learnt, n_vocab))), types + (UNUSED,) * n_unused, merges, tokens.index(BOS), tokens.index(EOS)
    )


def read_tokenizer_json(path: Path, n_vocab: int) -> Vocabulary:
    """Read the vocabulary of a tokenizer.json (byte-level BPE, such as DeepSeek's), filled up to n_vocab tokens.

    Raises TokenizerError naming the file and what is wrong with it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids: dict[str, int] = dict(content["model"]["vocab"])
        merges = tuple(merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"])
        added = {entry["content"]: (int(entry["id"]), bool(entry["special"])) for entry in content["added_tokens"]}
        ids |= {token: i for token, (i, _) in added.items()}
        bos_id, eos_id = ids[BOS], ids[EOS]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TokenizerError(f"{path}: not a DeepSeek tokenizer.json with byte-level BPE ({type(error).__name__}: {error})") from error
    if max(ids.values()) >= n_vocab:
        raise TokenizerError(f"{path}: its largest token id is {max(ids.values())}, but the model has only {n_vocab} tokens")
    tokens, types = list(map(_placeholder, range(n_vocab))), [UNUSED] * n_vocab
    for token, i in ids.items():
        tokens[i], types[i] = token, NORMAL
    for i, special in added.values():
        types[i] = CONTROL if special else USER_DEFINED
    return Vocabulary(tuple(tokens), tuple(types), merges, bos_id, eos_id)


def _placeholder(i: int) -> str:
    return f"<placeholder-{i}>"
