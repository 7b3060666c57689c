"""Sessions on disk: a folder of files, shared by servers, that outlives them. Plain host code: arrays are numpy's."""

from ds4jax.config import KVPolicy
from ds4jax.serving.engine.kvstore.folder import StoredEntry
from ds4jax.serving.engine.kvstore.format import Entry, Part, Reason
from ds4jax.serving.engine.kvstore.keys import Identity
from ds4jax.serving.engine.kvstore.saving import Saving
from ds4jax.serving.engine.kvstore.store import Draft, Found, KVStore, open_store
from ds4jax.serving.engine.kvstore.texts import TokenTexts

__all__ = [
    "Draft",
    "Entry",
    "Found",
    "Identity",
    "KVPolicy",
    "KVStore",
    "Part",
    "Reason",
    "Saving",
    "StoredEntry",
    "TokenTexts",
    "open_store",
]
