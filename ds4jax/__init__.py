"""ds4jax: serve DeepSeek V4 Flash from ds4's GGUF files to many sessions at once, in JAX."""

__version__ = "0.1.0"
