"""Kernels against their plain twins, interpreted on the CPU."""

import jax
import numpy as np
import pytest

from ds4jax.model import hyper
from ds4jax.model.kernels import sinkhorn


@pytest.mark.parametrize(("m", "h"), [(1, 4), (3, 2), (33, 4)])
def test_sinkhorn_kernel_equals_its_twin(m: int, h: int) -> None:
    z = jax.random.normal(jax.random.key(m), (m, h, h), np.float32) * 3
    got, want = jax.jit(lambda z: (sinkhorn.sinkhorn(z, 20, 1e-6, interpret=True), hyper.sinkhorn(z, 20, 1e-6)))(z)
    np.testing.assert_allclose(got, want, atol=1e-6)
