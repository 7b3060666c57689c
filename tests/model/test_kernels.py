"""Kernels against their plain twins, interpreted on the CPU."""

import jax
import numpy as np
import pytest

from ds4jax.model import hyper
from ds4jax.model.kernels import sinkhorn


@pytest.mark.parametrize("m", [1, 2, 3, 16, 33])
@pytest.mark.parametrize("h", [2, 4])
def test_sinkhorn_kernel_equals_its_twin(m: int, h: int) -> None:
    z = jax.random.normal(jax.random.key(m), (m, h, h), np.float32) * 3
    got = sinkhorn.sinkhorn(z, 20, 1e-6, interpret=True)
    np.testing.assert_allclose(got, hyper.sinkhorn(z, 20, 1e-6), atol=1e-6)
