"""The launch that puts a token into the cache against the plain path, token by token over the boundaries of windows."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.config import FLASH
from ds4jax.model import cache as caches
from ds4jax.model.compressor import Compressor
from ds4jax.model.kernels.extend import Pool, extend
from ds4jax.model.norm import rms_norm
from ds4jax.model.rope import frequencies, rotate
from ds4jax.model.spec import AbstractSource
from ds4jax.model.weights import Take
from tests.model.lowering import lower_for_cuda

CONFIG = replace(
    FLASH, name="test", n_embd=128, n_layer=4, head_dim=128, q_lora_rank=64, n_window=64, compress_ratios=(4, 128, 4, 128),
    swiglu_clamp=(10.0,) * 4, swiglu_clamp_shared=(10.0,) * 4,
)  # fmt: skip
Q, K, J, L, S, LAYER = 64, 128, 128, 2, 3, np.int32([1])
OMEGA = frequencies(CONFIG, compressed=True)


def compressor(ratio: int, width: int, mixed: bool, seed: int) -> Compressor:
    made = Compressor(CONFIG, Take(AbstractSource({}), (), False), "c", ratio, width, with_hadamard=mixed)
    keys = jax.random.split(jax.random.key(seed))
    made.ape.set_value(jax.random.normal(keys[0], (ratio, made.columns)))
    made.norm.set_value(1 + 0.2 * jax.random.normal(keys[1], (width,)))
    return made


def pool_of(made: Compressor, first: int, at: int, window: caches.Window, rows: caches.Rows) -> Pool:
    ape, norm = (jnp.stack([jnp.full_like(p.get_value(), jnp.nan), p.get_value()]) for p in (made.ape, made.norm))
    return Pool((first, first + made.columns), jnp.int32([at]), ape, norm, window, rows, made.ratio, made.with_hadamard)


def state(kv_quant: str) -> caches.KVCache:
    return caches.init_cache(CONFIG, S, 512, kv_quant, "bfloat16")


@pytest.mark.parametrize("kv_quant", ["ds4", "none"])
@pytest.mark.parametrize("ratio", [4, 128])
def test_it_extends_as_the_plain_path(ratio: int, kv_quant: str) -> None:
    jobs = [(compressor(ratio, K, False, 1), "win4" if ratio == 4 else "win128", "comp4" if ratio == 4 else "comp128")]
    if ratio == 4:
        jobs.append((compressor(4, J, kv_quant == "ds4", 2), "win_index", "index"))
    norms = [1 + 0.2 * jax.random.normal(jax.random.key(n), (L, n)) for n in (Q, K)]
    n_column = Q + K + sum(2 * made.columns for made, *_ in jobs)

    @jax.jit
    def both(kernel: caches.KVCache, plain: caches.KVCache, proj: jax.Array, slot: jax.Array, position: jax.Array):  # noqa: ANN202
        firsts = np.cumsum([Q + K, *(2 * made.columns for made, *_ in jobs)])
        pools = [pool_of(made, int(f), 1, getattr(kernel, w), getattr(kernel, r)) for f, (made, w, r) in zip(firsts, jobs, strict=False)]
        lora, raw, done = extend(proj, LAYER, jnp.int32([2]), *norms, kernel.raw, pools, slot, position, omega=OMEGA, eps=CONFIG.rms_eps)
        kernel = replace(
            kernel,
            raw=raw,
            **{name: new for (_, w, r), pair in zip(jobs, done, strict=True) for name, new in zip((w, r), pair, strict=True)},
        )

        row = rotate(rms_norm(proj[:, Q : Q + K], CONFIG.rms_eps, norms[1][1]), position, OMEGA)
        plain = replace(plain, raw=plain.raw.write(2, slot, position % CONFIG.n_window, row))
        for first, (made, w, r) in zip(firsts, jobs, strict=False):
            u, gate = (proj[:, int(first) + i * made.columns :][:, : made.columns] for i in range(2))
            window, rows = made.step(getattr(plain, w), getattr(plain, r), jnp.int32(1), slot, position, u, made.gates(gate, position))
            plain = replace(plain, **{w: window, r: rows})
        return kernel, plain, lora, rms_norm(proj[:, :Q], CONFIG.rms_eps, norms[0][1])

    kernel, plain = state(kv_quant), state(kv_quant)
    untouched = jax.tree.map(lambda a: np.asarray(a), kernel)
    for step in range(140 if ratio == 128 else 21):
        start = 120 if ratio == 128 else 0
        proj = 3 * jax.random.normal(jax.random.key(step), (3, n_column))
        slot = jnp.int32([2, S, 0])  # the second row is nobody's
        kernel, plain, lora, want = both(kernel, plain, proj, slot, jnp.int32([step, 7, step + start]))
        np.testing.assert_allclose(lora.astype(jnp.float32), want, rtol=2**-8)
    for name in ("raw", "win4", "win128", "win_index", "comp4", "comp128", "index"):
        for got, expected, empty in zip(*(jax.tree.leaves(getattr(c, name)) for c in (kernel, plain, untouched)), strict=True):
            got, expected = np.asarray(got), np.asarray(expected)
            np.testing.assert_array_equal(got[:, 1], empty[:, 1])  # a slot that no row has
            if got.dtype in (np.uint8, np.int8):
                assert np.mean(got != expected) < 1e-3  # rounding differences may move a value over an edge
            else:
                np.testing.assert_allclose(got.astype(np.float32), expected.astype(np.float32), rtol=2**-7, atol=2e-5)


@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    cache = jax.eval_shape(partial(caches.init_cache, FLASH, 64, 4096, "ds4", "bfloat16"))
    shape, m = jax.ShapeDtypeStruct, 64
    layer, vector = shape((1,), jnp.int32), shape((m,), jnp.int32)
    at, pools = 1536, []
    for width, window, rows, mixed in (
        (512, cache.win4 if ratio == 4 else cache.win128, cache.comp4 if ratio == 4 else cache.comp128, False),
        (128, cache.win_index, cache.index, True),
    ):
        columns = width * (2 if ratio == 4 else 1)
        if ratio and (ratio == 4 or not mixed):
            pools.append((at, shape((20, ratio, columns), jnp.float32), shape((20, width), jnp.float32), window, rows, mixed))
            at += 2 * columns

    def run(proj, layer, q_norm, kv_norm, raw, arrays, slot, position):  # noqa: ANN001, ANN202
        made = [Pool((p[0], p[0] + a[0].shape[2]), layer, *a, ratio, p[5]) for p, a in zip(pools, arrays, strict=True)]
        return extend(proj, layer, layer, q_norm, kv_norm, raw, made, slot, position, omega=OMEGA, eps=1e-6)

    arrays = [p[1:5] for p in pools]
    norms = [shape((20, n), jnp.float32) for n in (1024, 512)]
    lower_for_cuda(monkeypatch, run, shape((m, at + 64), jnp.float32), layer, *norms, cache.raw, arrays, vector, vector)
