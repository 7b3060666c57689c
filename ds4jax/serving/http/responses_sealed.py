"""Thoughts that a client of `/v1/responses` carries from turn to turn without reading them: `encrypted_content`. No I/O.

They are encoded, not encrypted: whoever may talk to the server may have its model think anything anyway, and a key would tie a
conversation to one server. The digest only finds what was cut or changed on its way.
"""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b

_MARK = b"ds4jax"  # as long as a number of whole base64 groups, so that it shows in the encoded text
_ENCODED_MARK = base64.b64encode(_MARK).decode()
_N_DIGEST = 9  # bytes; as above


def seal(thoughts: str) -> str:
    """Write thoughts as text that `unseal` reads, on this server or another."""
    data = thoughts.encode()
    return base64.b64encode(_MARK + _digest(data) + data).decode()


def unseal(sealed: str) -> str | None:
    """Read sealed thoughts; None for those of a server of another make, which nobody else can read.

    Raises ValueError if they are not as they were sealed.
    """
    if not sealed.startswith(_ENCODED_MARK):
        return None
    try:
        whole = base64.b64decode(sealed, validate=True)
    except binascii.Error:
        raise ValueError("no base64 text") from None
    digest, data = whole[len(_MARK) : len(_MARK) + _N_DIGEST], whole[len(_MARK) + _N_DIGEST :]
    if digest != _digest(data):
        raise ValueError("cut or changed")
    return data.decode()


def _digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=_N_DIGEST).digest()
