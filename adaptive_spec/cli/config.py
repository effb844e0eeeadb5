"""`adaptive-spec config`: check an adaptive config, or convert one from the older format."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAVY
from rich.console import Console
from rich.table import Table

from adaptive_spec.config import (
    AdaptiveConfig,
    AdaptiveConfigWarning,
    SlotConfig,
    config_json,
    load_adaptive_config,
    migrate_adaptive_config,
    read_raw_config,
)

app = typer.Typer(
    help="Check or convert an adaptive config.", no_args_is_help=True, add_completion=False
)

ConfigFile = Annotated[str, typer.Argument(metavar="FILE", help="JSON config.")]


@app.command()
def check(file: ConfigFile) -> None:
    """Show the table that FILE resolves to; exit code 2 and one line if it is wrong."""
    config = _load(file)
    console = Console()
    console.print(_table(config))
    console.print(f"candidate steps of all slots: {', '.join(map(str, config.candidate_steps))}")
    if config.slot_debounce > 1:
        console.print(f"slot_debounce: {config.slot_debounce} rounds")


@app.command()
def migrate(
    file: ConfigFile,
    write: Annotated[bool, typer.Option("--write", help="Overwrite FILE.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT", help="Write to OUT.")
    ] = None,
) -> None:
    """Convert FILE from the older format with one global candidate_steps; prints the new config."""
    if write and output is not None:
        raise ValueError("--write and --output exclude each other; give one of them")
    raw, origin = read_raw_config(file)
    try:
        table = migrate_adaptive_config(raw)
    except ValueError as error:
        raise ValueError(f"{origin}{error}") from None
    _load(table, origin)
    current = table == raw
    if current:
        typer.echo(f"{origin}has batch-size keys already, nothing to convert", err=True)
    text = config_json(table)
    if write:
        if not current:
            Path(file).write_text(text, encoding="utf-8")
    elif output is not None:
        output.write_text(text, encoding="utf-8")
    else:
        typer.echo(text, nl=False)


def _load(source: str | dict[str, Any], origin: str = "") -> AdaptiveConfig:
    """Load with warnings as plain lines on stderr, and `origin` before what has no file name."""
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AdaptiveConfigWarning)
            config = load_adaptive_config(source)
    except ValueError as error:
        raise ValueError(f"{origin}{error}") from None
    for warning in caught:
        typer.echo(f"warning: {origin}{warning.message}", err=True)
    return config


def _table(config: AdaptiveConfig) -> Table:
    """A row for each slot; knobs that every slot leaves at their default are not shown."""
    knobs = [
        field
        for field in dataclasses.fields(SlotConfig)
        if field.default is not dataclasses.MISSING
    ]
    always = ("up_hysteresis", "down_hysteresis", "ema_alpha", "update_interval", "warmup_batches")
    names = [
        field.name
        for field in knobs
        if field.name in always
        or any(getattr(slot, field.name) != field.default for slot in config.slots)
    ]
    # One word a line: all columns then fit the 80 columns of a plain terminal.
    headings = [name.replace("_", "\n") for name in ("batch_size", "candidate_steps", *names)]
    table = Table(*headings, box=SIMPLE_HEAVY)
    bounds = [slot.batch_size for slot in config.slots]
    for index, slot in enumerate(config.slots):
        # Batches below the first bound go to the first slot too.
        low = 1 if index == 0 else bounds[index]
        last = index + 1 == len(bounds)
        table.add_row(
            f"{low}+" if last else f"{low}-{bounds[index + 1] - 1}",
            ", ".join(map(str, slot.candidate_steps)),
            *(str(getattr(slot, name)) for name in names),
        )
    return table
