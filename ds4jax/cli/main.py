"""The `ds4jax` command. Importing it loads no jax: each command imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from ds4jax import __version__
from ds4jax.cli import bench, cache, chat, download, evaluate, generate, inspect, precompile, serve, synth
from ds4jax.cli.console import fail
from ds4jax.errors import ConfigError, Ds4jaxError


class _Commands(TyperGroup):
    """Shows our own errors as one message; anything else is a bug and keeps its traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Ds4jaxError as error:
            fail(str(error))
            # 2, as for a wrong option, where another command line would help.
            raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="Serve DeepSeek V4 Flash in JAX."
)
# ds4-server's flags that have no effect here are told apart by serve itself.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(serve.serve)
app.command()(precompile.precompile)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(inspect.inspect)
app.command()(synth.synth)
app.command()(download.download)
app.command("eval")(evaluate.evaluate)
app.add_typer(bench.app, name="bench")
app.add_typer(cache.app, name="cache")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"ds4jax {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """Serve DeepSeek V4 Flash from ds4's GGUF files to many sessions at once."""
