"""The command line: `ds4jax serve | generate | chat | bench | inspect | synth | precompile | download`."""

from ds4jax.cli.presets import default_model

__all__ = ["default_model"]
