"""Learn the vocabulary: byte-level BPE that splits text as DeepSeek's does, with its special tokens as literals."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer as Learner
from tokenizers import models, pre_tokenizers, trainers

from ds4jax.cli.vocabulary import NORMAL, SPECIAL_TOKENS
from ds4jax.text.bpe import BYTE_OF_LETTER, build_encoder
from ds4jax.text.special import BOS, EOS
from ds4jax.text.tokenizer import Tokenizer
from ds4jax.text.vocabulary import CONTROL, Vocabulary


def learn_vocabulary(texts: Iterable[str], n_vocab: int) -> Vocabulary:
    """Learn exactly n_vocab tokens, special ones included, from texts. Raises ValueError where the texts hold too few merges."""
    letters = list(BYTE_OF_LETTER)
    learner = Learner(models.BPE())
    splitter: pre_tokenizers.PreTokenizer = build_encoder(models.BPE(), added=()).pre_tokenizer
    learner.pre_tokenizer = splitter
    n_learnt = n_vocab - len(SPECIAL_TOKENS)
    learner.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=n_learnt, initial_alphabet=letters, show_progress=False))
    merges = tuple(" ".join(pair) for pair in json.loads(learner.to_str())["model"]["merges"])
    tokens = (*SPECIAL_TOKENS, *letters, *(merge.replace(" ", "") for merge in merges))
    if len(tokens) != n_vocab:
        raise ValueError(f"the texts give {len(tokens)} tokens, expected {n_vocab}; add texts or ask for fewer tokens")
    types = (CONTROL,) * len(SPECIAL_TOKENS) + (NORMAL,) * n_learnt
    return Vocabulary(tokens, types, merges, tokens.index(BOS), tokens.index(EOS))


def tokenizer_of(vocabulary: Vocabulary) -> Tokenizer:
    """Return the tokenizer of a vocabulary."""
    v = vocabulary
    return Tokenizer(v.tokens, v.types, v.merges, v.bos_id, v.eos_id)
