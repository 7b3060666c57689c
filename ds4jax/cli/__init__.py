"""The command line: `ds4jax serve | precompile | generate | chat | bench | inspect | synth | download`."""

from ds4jax.cli.small_model import default_model

__all__ = ["default_model"]
