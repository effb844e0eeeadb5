"""The `adaptive-spec` command.

Each subcommand is a module of this package that holds a typer app named `app`; it is imported only
when it is called for (or listed by --help), so `config check` needs neither torch nor the compiled
extension. What a user can get wrong arrives as ValueError, ImportError or OSError with a message
that says what to do: it is shown as one line, without a traceback, and the exit code is 2.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import typer
from typer.core import TyperGroup

_SUBCOMMANDS = ("config", "demo", "generate", "simulate", "doctor")


class _LazyGroup(TyperGroup):
    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in _SUBCOMMANDS if importlib.util.find_spec(f"{__name__}.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{__name__}.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (ValueError, ImportError, OSError) as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(2) from None


main = typer.Typer(
    cls=_LazyGroup,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@main.callback()
def _main() -> None:
    """Adaptive speculative decoding: drafts as many tokens as get accepted."""
