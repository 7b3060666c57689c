"""Strict JSON into typed bodies, with errors that name the place."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from ds4jax.errors import RequestError

Body = TypeVar("Body", bound=msgspec.Struct)

TOO_DEEP = "invalid JSON: nested too deeply; send a flatter body"

_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(?P<name>[^`]+)`")
_EXPECTED = re.compile(r"^Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`$")
# The first half of a surrogate pair without the second; an even number of backslashes before it means that it is an escape.
_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*(?P<escape>\\u[dD][89abAB][0-9a-fA-F]{2})(?!\\u[dD][c-fC-F])")


def raw_default(text: bytes) -> Any:
    """Declare a member that stays as its bytes, and is `text` where it is left out."""
    return msgspec.field(default_factory=lambda: msgspec.Raw(text))


def decode(data: bytes, body_type: type[Body]) -> Body:
    """Decode a request body; unknown members are ignored, the last of several members of one name wins.

    Raises RequestError that says what is wrong and where: the byte for broken JSON (NaN, raw control characters, lone
    surrogates and invalid UTF-8 are broken JSON here), the field for a value of the wrong type.
    """
    try:
        data.decode("utf-8")
        return msgspec.json.decode(data, type=body_type)
    except UnicodeDecodeError as error:
        raise RequestError(f"invalid JSON: byte {error.start} is not UTF-8; send the body encoded as UTF-8") from None
    except RecursionError:
        raise RequestError(TOO_DEEP) from None
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error)) from None
    except msgspec.DecodeError as error:
        raise _malformed(str(error), data) from None


def _malformed(message: str, data: bytes) -> RequestError:
    """Name the byte at which the text stops being JSON."""
    lone = _LONE_SURROGATE.search(data)
    if lone is not None:
        return RequestError(f"invalid JSON: lone surrogate {lone['escape'].decode()} at byte {lone.start('escape')}; send whole characters")
    if not data.strip():
        return RequestError("invalid JSON: the request body is empty; send a JSON object")
    if "truncated" in message:
        return RequestError(f"invalid JSON: the text ends early, at byte {len(data)}")
    return RequestError("invalid JSON: " + message.removeprefix("JSON is malformed: "))


def _wrong_value(message: str) -> RequestError:
    """Turn `Expected ... - at $.path` into `path: expected ...`."""
    place = _PLACE.match(message)
    what, path = (place["what"], place["path"]) if place else (message, None)
    if missing := _MISSING.search(what):
        name = f"{path}.{missing['name']}" if path else missing["name"]
        return RequestError(f"{name}: this field is required", name)
    if expected := _EXPECTED.match(what):
        wanted = expected["wanted"].replace(" | null", "").replace(" | ", " or ")
        what = f"expected {wanted}, got {expected['got']}"
    return RequestError(f"{path}: {what}" if path else f"the request body: {what}", path)
