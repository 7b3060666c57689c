"""IQ2_XXS: sub-vectors of eight values from a codebook of 256, an even number of signs, one scale for 32 values."""

from __future__ import annotations

from functools import reduce
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

# One entry of the codebook in four hexadecimal digits: a 16-bit number whose bits 2j and 2j + 1 select the magnitude of element j.
_CODEBOOK = (
    "0000000200050008000a00110014002000220028002a00410044005000580061006400800082008a00a201010104011001150140018401980200020202220282"
    "04010404041004210424044004420448046004810484049004a405000502050805200546056905800591060906100640068406a4080008050808081408280841"
    "0844085008520888090409400a020a141001100410101021104010601084109010951100110811201150115a1180122412451400140814201425144914801518"
    "156216001616180118041810184018811900190519a01a5120002002200a20442061208020822129214822002202240124042410244024562500254125642690"
    "2808282028942a444001400440104018402140244040404840564060408140844090410041204161418041854201421042484256426844004408442044804499"
    "4512452446004801480448104840484549004958496149824a454a9050005008501150195020508050885104514251a4529154905492550a5601565458005811"
    "5819586459405a086004601060406068610061556218626064006405651065126584684280008002800a80418082810481188140821184018404841084158440"
    "8460850085468594860986408660880289048a11900490109024904090a1911691809245940094229444955198819920a002a050a085a109a200a418a850a904"
)
SELECTORS = np.frombuffer(bytes.fromhex(_CODEBOOK), ">u2").astype(np.uint32)

_Integers = TypeVar("_Integers", np.ndarray, Array)


def codebook() -> np.ndarray:
    """Expand the codebook: int32 [256, 8], entries 8, 25 or 43."""
    return _magnitude(SELECTORS[:, None] >> np.arange(0, 16, 2, dtype=np.uint32) & 3).astype(np.int32)


def iq2_xxs(fields: dict[str, Array]) -> Array:
    """Decode IQ2_XXS: d f16 [..., K/256], index and signs uint32 [..., K/32] -> f32 [..., K].

    A group of 32 has four codebook indices in the bytes of `index`; `signs` holds four 7-bit sign patterns and, on top, the 4-bit scale s.
    w = d * (0.5 + s) / 4 * magnitude * sign; all factors but d are small, so the product is exact in float32.
    """
    d, index, signs = fields["d"].astype(jnp.float32), fields["index"], fields["signs"]
    s = (signs >> 28).astype(jnp.float32).reshape(*d.shape, 8)
    scale = (d[..., None] * (s + 0.5) * 0.25).reshape(index.shape)
    k = _counter(*index.shape, 4)
    entry = lax.bitcast_convert_type(index, jnp.uint8)
    # Shifts one after the other: the compiler makes an array of shifts once, outside of the loop over layers, and reads it for every value.
    pattern = reduce(lax.shift_right_logical, [k] * 7, jnp.broadcast_to(signs[..., None], k.shape)) & 127
    # The eighth sign is not stored: it makes the number of minus signs even.
    pattern = pattern | lax.population_count(pattern) << 7
    # Looking up 16-bit selectors and computing magnitudes is twice as fast on a CPU as looking up vectors of eight.
    j = _counter(*pattern.shape, 8)
    magnitude = _magnitude(jnp.asarray(SELECTORS)[entry][..., None] >> j >> j & 3).astype(jnp.int32)
    quants = jnp.where(pattern[..., None] >> j & 1 == 1, -magnitude, magnitude).astype(jnp.float32)
    return (scale[..., None, None] * quants).reshape(*index.shape[:-1], -1)


def _counter(*shape: int) -> Array:
    """Count along the last axis: uint32 of this shape."""
    return lax.broadcasted_iota(jnp.uint32, shape, len(shape) - 1)


def _magnitude(selector: _Integers) -> _Integers:
    """Map 0, 1, 2 to 8, 25, 43."""
    return 8 + 17 * selector + (selector >> 1)
