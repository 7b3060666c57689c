"""Leave of each row's logits those of the tokens that may come next.

What may come next is decided on the host, token by token, and lies on the device as one row of bits a slot. When it begins to
hold is decided here, so that a row whose mask waits for a certain token runs ahead of the host until that token is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

NEVER, ALWAYS = -1, -2  # in the place of a token id: no mask holds; it holds from now on
WORD = 32  # bits


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowMask:
    """The masks of all slots, and when those of a step's rows hold.

    table: uint32 [S, W], a bit for each token, the lowest of the first word for token 0.
    fed: int32 [B], the token that the step feeds. after: int32 [B], the one behind which the mask holds, ALWAYS or NEVER.
    barred: int32 [B], a token that may not be drawn before that, or NEVER.
    """

    table: jax.Array
    fed: jax.Array
    after: jax.Array
    barred: jax.Array

    @property
    def asking(self) -> jax.Array:
        """bool [B]: rows that a mask may change."""
        return self.after != NEVER


def n_words(n_vocab: int) -> int:
    """Words of a mask."""
    return -(-n_vocab // WORD)


def mask_logits(logits: jax.Array, mask: RowMask, slot: jax.Array) -> jax.Array:
    """Set to -inf what may not be drawn; rows that no mask asks for keep theirs bit for bit.

    Args:
        logits: [B, V] f32, adjusted already. slot: int32 [B], out of range for padding.
    """
    b, v = logits.shape
    words = mask.table.at[slot].get(mode="clip")  # [B, W]
    bits = (words[:, :, None] >> jnp.arange(WORD, dtype=jnp.uint32)[None, None, :]) & jnp.uint32(1)
    allowed = bits.reshape(b, -1)[:, :v] != 0
    holds = (mask.after == ALWAYS) | (mask.after == mask.fed)
    barred = jnp.arange(v, dtype=jnp.int32)[None, :] == mask.barred[:, None]
    return jnp.where(mask.asking[:, None] & ~jnp.where(holds[:, None], allowed, ~barred), -jnp.inf, logits)
