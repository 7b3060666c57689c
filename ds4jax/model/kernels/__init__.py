"""Kernels for accelerators. Each has a plain-jnp twin beside the mathematics it computes; tests hold the two together."""
