"""Fields that other servers know and this one cannot honour yet. Delete a row when its feature arrives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from ds4jax.errors import RequestError

# field -> values that ask for nothing (beside null)
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "tools": ([],),
    "functions": ([],),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "echo": (False,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}

if TYPE_CHECKING:

    class UnsupportedFields(msgspec.Struct):
        """Base of request bodies: receives the fields above, so that they can be refused by name."""
else:
    UnsupportedFields = msgspec.defstruct("UnsupportedFields", [(name, Any, None) for name in _NEUTRAL])


def reject_unsupported(body: msgspec.Struct, *, honoured: Collection[str] = ()) -> None:
    """Refuse fields that would change the answer, but for those that the API at hand honours.

    Ignoring them would be worse: the client would get the answer to another question. Raises RequestError naming the field.
    """
    for name, neutral in _NEUTRAL.items():
        value = getattr(body, name)
        if name not in honoured and value is not None and not any(_same(value, x) for x in neutral):
            allowed = f" or send {msgspec.json.encode(neutral[0]).decode()}" if neutral else ""
            raise RequestError(f"{name}: not supported yet; leave it out{allowed}", name)


def _same(a: Any, b: Any) -> bool:
    """Equal, where false is not 0: `"logprobs": 0` does ask for something."""
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)
