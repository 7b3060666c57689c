"""Run the command line as `python -m ds4jax.cli`, where the `ds4jax` script is not installed."""

from ds4jax.cli.main import app

app()
