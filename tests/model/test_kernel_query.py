"""The kernel that finishes a chunk's queries against norm and rotation of the plain path, and that it lowers for a GPU."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ds4jax.config import FLASH
from ds4jax.model.kernels.query import finish_queries
from ds4jax.model.norm import rms_norm
from ds4jax.model.rope import frequencies, rotate
from tests.model.lowering import lower_for_cuda

OMEGA = frequencies(FLASH, compressed=True)


@pytest.mark.parametrize(("n_head", "width"), [(2, 128), (32, 192)])
def test_it_normalises_and_rotates(n_head: int, width: int) -> None:
    q = jax.random.normal(jax.random.key(0), (3, n_head, width)) * jnp.asarray([1e-3, 1.0, 50.0])[:, None, None]
    position = np.int32([0, 7, 30_000])
    got = jax.jit(partial(finish_queries, omega=OMEGA, eps=1e-6, dtype=jnp.float32))(q, position)
    want = rotate(rms_norm(q, 1e-6), jnp.asarray(position)[:, None], OMEGA)
    np.testing.assert_allclose(got, want, atol=2e-6)


def test_nan_stays_with_its_head() -> None:
    q = np.ones((2, 2, 64), np.float32)
    q[1, 0, 5] = np.nan
    got = np.asarray(finish_queries(jnp.asarray(q), jnp.int32([1, 2]), omega=OMEGA, eps=1e-6, dtype=jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(np.isnan(got).all(axis=2), [[False, False], [True, False]])
    assert np.isfinite(got[[0, 0, 1], [0, 1, 1]]).all()


@pytest.mark.parametrize("m", [128, 2048])
def test_it_lowers_for_a_gpu(monkeypatch: pytest.MonkeyPatch, m: int) -> None:
    finish = partial(finish_queries, omega=OMEGA, eps=1e-6, dtype=jnp.float16)
    lower_for_cuda(monkeypatch, finish, jax.ShapeDtypeStruct((m, 64, 512), jnp.float32), jax.ShapeDtypeStruct((m,), jnp.int32))
