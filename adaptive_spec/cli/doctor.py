"""`adaptive-spec doctor`: what was built, what this machine can do, what to do about the rest."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from adaptive_spec.cli.findings import BROKEN, MISSING, Finding, examine

app = typer.Typer(add_completion=False)

_COLOURS = {BROKEN: "red", MISSING: "yellow"}


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what was built and what works here. Exit status 1 if something needed is broken."""
    findings = examine()
    ok = all(finding.state != BROKEN for finding in findings)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "findings": [vars(f) for f in findings]}, indent=2))
    else:
        _show(findings)
        typer.echo("all that is needed works" if ok else "something needed is broken, see above")
    if not ok:
        raise typer.Exit(1)


def _show(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        state = typer.style(f"{finding.state:7}", fg=_COLOURS.get(finding.state, "green"))
        typer.echo(f"{state}  {finding.name:{width}}  {finding.text}")
        if finding.cure:
            typer.echo(f"{'':{width + 11}}{finding.cure}")
