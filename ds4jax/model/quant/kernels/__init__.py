"""Kernels that read packed weights. Each has a plain-jnp twin: `dequantize` and a product."""
