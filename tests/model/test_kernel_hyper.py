"""Kernels of hyper-connections and of the router against the plain path, and that they lower for a GPU at Flash's shapes."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.model import hyper as plain
from ds4jax.model import quant
from ds4jax.model.kernels import hyper, router
from ds4jax.model.moe import MIN_WEIGHT_SUM
from ds4jax.model.norm import rms_norm
from tests.model.lowering import lower_for_cuda
from tests.model.test_quant import random_weight

H, D, L = 4, 256, 2
N_MIX = 2 * H + H * H
LAYER = np.int32([1])
STATICS = {"n_iter": 20, "hc_eps": 1e-6, "rms_eps": 1e-6}


@pytest.mark.parametrize(("kind", "m"), [("F16", 1), ("F32", 3), ("F16", 20), ("F16", 130)])  # each way of sharing the mixing weights
def test_a_site_equals_the_plain_path(kind: str, m: int) -> None:
    keys = jax.random.split(jax.random.key(m), 8)
    x, parts = jax.random.normal(keys[0], (m, H, D)), [jax.random.normal(k, (m, n, D)) for k, n in ((keys[1], 3), (keys[2], 1))]
    post, comb = jax.random.uniform(keys[3], (m, H)), jax.random.uniform(keys[4], (m, H, H))
    fn = random_weight(kind, (L, N_MIX, H * D))
    scale, base, norm = (jax.random.normal(k, (L, n)) for k, n in zip(keys[5:], (3, N_MIX, D), strict=True))

    @jax.jit  # one program: compiling is what this costs
    def both(x: jax.Array, parts: list[jax.Array], post: jax.Array, comb: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        new, products = hyper.advance(x, parts, post, comb, fn, LAYER)
        want = plain.HyperConnection.post(sum(p.sum(axis=1) for p in parts), x, post, comb)
        mix = quant.matmul(rms_norm(want.reshape(m, -1), 1e-6), quant.take_layer(fn, 1))
        s, b = scale[1], base[1][None]
        pre, after = (jax.nn.sigmoid(mix[:, i * H : (i + 1) * H] * s[i] + b[:, i * H : (i + 1) * H]) for i in range(2))
        square = plain.sinkhorn((mix[:, 2 * H :] * s[2] + b[:, 2 * H :]).reshape(m, H, H), 20, 1e-6)
        y = rms_norm(plain.weighted_sum(pre + 1e-6, want), 1e-6, norm[1])
        (got, rounded), *others = hyper.enter(new, products, scale, base, norm, LAYER, **STATICS, dtypes=(jnp.float32, jnp.bfloat16))
        exact = [new, got, *others, rounded.astype(jnp.float32)]
        return exact, [want, y, 2 * after, square, got.astype(jnp.bfloat16).astype(jnp.float32)]

    for got, want in zip(*both(x, parts, post, comb), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_a_row_has_the_same_bits_wherever_it_stands() -> None:
    m, keys = 20, jax.random.split(jax.random.key(0), 8)
    rows = [jax.random.normal(k, (m, *shape)) for k, shape in zip(keys, ((H, D), (1, D), (H,), (H, H)), strict=False)]
    fn = random_weight("F16", (L, N_MIX, H * D))
    scale, base, norm = (jax.random.normal(k, (L, n)) for k, n in zip(keys[4:], (3, N_MIX, D), strict=False))

    @jax.jit
    def site(x: jax.Array, part: jax.Array, post: jax.Array, comb: jax.Array) -> list[jax.Array]:
        x, products = hyper.advance(x, [part], post, comb, fn, LAYER)
        (y,), *others = hyper.enter(x, products, scale, base, norm, LAYER, **STATICS)
        return [x, y, *others]

    order = np.random.default_rng(0).permutation(m)
    for there, here in zip(site(*(a[order] for a in rows)), site(*rows), strict=True):
        np.testing.assert_array_equal(there, here[order])


@pytest.mark.parametrize(("m", "e"), [(1, 6), (5, 6), (4, 16)])
@pytest.mark.parametrize("by_token", [False, True])
def test_the_router_chooses_as_the_plain_path(m: int, e: int, by_token: bool) -> None:
    rng = np.random.default_rng(m)
    logits, bias = rng.normal(size=(m, e)).astype(np.float32), rng.normal(size=(L, e)).astype(np.float32)
    logits[0] = 0.25
    bias[1, :3] = bias[1, 3:6].max() + 1  # equal scores: the lower ids are chosen
    table = rng.random((L, 10, e)).argsort(axis=2)[:, :, :3].astype(np.int32)
    token, live = rng.integers(0, 10, m).astype(np.int32), np.arange(m) != 2
    tables = (None, jnp.asarray(table)) if by_token else (jnp.asarray(bias), None)
    weight, pairs = router.choose(jnp.asarray(logits), *tables, token, live, LAYER, n_used=3, scale=1.5, least=MIN_WEIGHT_SUM)

    score = np.sqrt(np.log1p(np.exp(logits)))
    expert = table[1][token] if by_token else np.asarray(jax.lax.top_k(score + bias[1], 3)[1])
    want = np.take_along_axis(score, expert, axis=1)
    np.testing.assert_allclose(weight, want / want.sum(axis=1, keepdims=True) * 1.5, rtol=1e-5)
    chosen = np.where(live[:, None], expert, e).reshape(-1)
    order = np.argsort(chosen, kind="stable") if m > 1 else np.arange(3)
    np.testing.assert_array_equal(pairs.home, order)
    np.testing.assert_array_equal(pairs.expert, chosen[order])


@pytest.mark.parametrize("m", [1, 64, 256])  # the last as a chunk has them
def test_they_lower_for_a_gpu(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    def f32(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    layer, token = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((m,), jnp.int32)
    fn = quant.QTensor("F16", quant.field_shapes("F16", (20, 24, 4 * 4096)))
    assert hyper.fits(4, 4096, "F16")
    lower_for_cuda(monkeypatch, hyper.advance, f32(m, 4, 4096), [f32(m, 6, 4096), f32(m, 1, 4096)], f32(m, 4), f32(m, 4, 4), fn, layer)
    enter = partial(hyper.enter, **STATICS)
    lower_for_cuda(monkeypatch, enter, f32(m, 4, 4096), f32(m, 32, 32), f32(20, 3), f32(20, 24), f32(20, 4096), layer)
    choose = partial(router.choose, n_used=6, scale=1.5, least=MIN_WEIGHT_SUM)
    lower_for_cuda(monkeypatch, choose, f32(m, 256), f32(20, 256), None, token, token, layer)
    table = jax.ShapeDtypeStruct((3, 129280, 6), jnp.int32)
    lower_for_cuda(monkeypatch, choose, f32(m, 256), None, table, token, token, layer)
