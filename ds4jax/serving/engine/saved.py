"""The folder of saved sessions as one model uses it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax

from ds4jax.model.cache import init_cache
from ds4jax.model.model import Model
from ds4jax.model.spec import ModelSpec
from ds4jax.model.transfer import parts
from ds4jax.serving.engine.disk import SavedSessions
from ds4jax.serving.engine.kvstore import Identity, KVPolicy, TokenTexts, open_store
from ds4jax.serving.engine.kvstore.policy import chat_anchor
from ds4jax.serving.engine.kvstore.texts import SPECIAL
from ds4jax.serving.engine.log import logger
from ds4jax.text.dsml import ReplayMemory
from ds4jax.text.tokenizer import Tokenizer

_ROUND = 128 * 4  # tokens that are whole rows of every kind


def open_saved(
    folder: Path, model: Model, texts: TokenTexts, n_ctx: int, policy: KVPolicy, memory: ReplayMemory | None = None
) -> SavedSessions | None:
    """Open a folder of sessions for a model; None, after a warning, if that is impossible.

    memory: of the calls of tools; what is saved with the sessions is remembered there, and what it remembers is saved with them.
    """
    tokenizer = model.tokenizer
    if not model.digest:
        logger.warning("--kv-disk-dir: these weights come from no file by which their sessions would be known again; none are kept")
        return None
    identity = Identity(model.digest, cache_layout(model.spec))
    store = open_store(folder, identity, n_ctx, policy, texts=texts)
    if store is None:
        return None
    if memory is not None:
        for saved in reversed(list(store.replay_maps())):  # what was used last is remembered last
            memory.load(saved)

    def anchor(prompt: Sequence[int]) -> int | None:
        if tokenizer.user_id is None or tokenizer.assistant_id is None:
            return None
        return chat_anchor(prompt, tokenizer.user_id, tokenizer.assistant_id)

    def replay(text: bytes) -> bytes:
        return memory.dump(text.replace(SPECIAL, b"").decode("utf-8", "replace")) if memory is not None else b""

    return SavedSessions(store, anchor, lambda token: token == tokenizer.think_id, replay)


def cache_layout(spec: ModelSpec) -> str:
    """Return a digest of how a session lies in a file: the formats and shapes of its arrays, and which layers have them.

    Slots and context are no part of it: a session fits wherever its tokens do.
    """
    cache = jax.eval_shape(partial(init_cache, spec.config, 1, _ROUND, spec.kv_quant, spec.dtype))
    what = (spec.kv_quant, spec.dtype, spec.config.compress_ratios, spec.config.n_window, parts(cache, _ROUND))
    return hashlib.blake2b(repr(what).encode(), digest_size=16).hexdigest()


def token_texts(tokenizer: Tokenizer) -> TokenTexts:
    """Return the texts of a model's tokens."""
    ids = range(tokenizer.n_vocab)
    return TokenTexts([tokenizer.token_bytes(i) for i in ids], frozenset(i for i in ids if tokenizer.is_special(i)))
