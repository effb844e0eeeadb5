"""`adaptive-spec generate`: continue a prompt, showing which tokens were accepted drafts."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from stdin.")],
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Model pair; default: the shipped one.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to add.")] = 128,
    steps: Annotated[
        int | None, typer.Option(min=0, max=64, help="Always draft this many tokens.")
    ] = None,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode plainly; the same as --steps 0.")
    ] = False,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Adaptive config; default: the built-in table."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Sample at this temperature; 0: the likeliest token each time.")
    ] = 0.0,
    top_k: Annotated[int, typer.Option(help="Of the likeliest tokens only so many; 0: off.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Of the likeliest tokens only up to this probability; 1: off.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(help="Only tokens at least this share as likely as the likeliest; 0: off."),
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of sampling: the same seed gives the same text; default: drawn anew."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda[:i]; default: a GPU where one can be used.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="CPU threads; default: torch's choice.")
    ] = None,
    show_drafts: Annotated[
        bool | None,
        typer.Option(
            "--show-drafts/--plain",
            help="Colour the prompt, accepted drafts and the target's own tokens; default: on a "
            "terminal.",
        ),
    ] = None,
) -> None:
    """Continue PROMPT, text on stdout as it comes, one line of figures on stderr."""
    if no_speculation:
        if steps:
            raise ValueError(f"--no-speculation excludes --steps {steps}; give one of them")
        steps = 0
    if steps is not None and config is not None:
        raise ValueError("--config chooses the steps adaptively, so it excludes fixed steps")
    text = prompt
    if prompt == "-":
        # Whatever the locale says; the tokenizer refuses what is not UTF-8.
        text = sys.stdin.buffer.read().decode("utf-8", "surrogateescape").removesuffix("\n")
    if not text:
        raise ValueError("PROMPT: expected some text to continue, got none")

    from adaptive_spec.demo.pair import open_pair, require

    require("safetensors", "tokenizers")
    import torch

    from adaptive_spec.config import load_adaptive_config
    from adaptive_spec.demo.origins import OriginTracker
    from adaptive_spec.engine.engine import Engine
    from adaptive_spec.engine.sampling import SamplingParams
    from adaptive_spec.state import AdaptiveState

    sampling = SamplingParams(temperature, top_k, top_p, min_p, seed)
    if threads is not None:
        torch.set_num_threads(threads)
    table = None if steps is not None else load_adaptive_config(config)
    pair = open_pair(model, device)
    policy = None
    if table is not None:
        first = table.slots[0].candidate_steps
        place = pair.target.embedding.device
        policy = AdaptiveState(table, first[len(first) // 2], device=place)
    prompt_ids = pair.tokenizer.encode(text)
    context = pair.target.config.max_position_embeddings
    engine = Engine(
        pair,
        max_batch_size=1,
        max_len=min(len(prompt_ids) + max_new_tokens, context),
        policy=policy,
        speculative_num_steps=steps,
    )

    # click takes colours out by itself where stdout is no terminal.
    colour = show_drafts
    coloured = sys.stdout.isatty() if show_drafts is None else show_drafts

    def show(piece: str, **style: object) -> None:
        typer.echo(typer.style(piece, **style) if coloured else piece, nl=False, color=colour)

    start = time.perf_counter()
    request = engine.submit(prompt_ids, max_new_tokens, sampling=sampling)
    if coloured:
        show(text, dim=True)
    tracker, stream = OriginTracker(request), pair.tokenizer.stream()
    rounds_at: dict[int, int] = {}
    decode_seconds, decoded = 0.0, 0
    while not request.finished:
        report = engine.step()
        if report.batch_size:
            decode_seconds += report.seconds
            decoded += report.emitted
            used = report.speculative_num_steps
            rounds_at[used] = rounds_at.get(used, 0) + 1
        for token, accepted in tracker.update():
            if piece := stream.push(token):
                show(piece, fg="green" if accepted else "yellow", bold=accepted)
    show(stream.finish())
    typer.echo()
    seconds = time.perf_counter() - start
    shares = ", ".join(f"S={s} in {n}" for s, n in sorted(rounds_at.items()))
    speed = decoded / decode_seconds if decode_seconds else 0.0
    typer.echo(
        f"{len(request.output_ids)} tokens in {seconds:.2f} s ({speed:.0f} tokens/s decoding), "
        f"{request.num_rounds} rounds{f' ({shares})' if shares else ''}, "
        f"{request.mean_accepted_drafts:.2f} drafts accepted per round, "
        f"ended by {request.finish_reason.replace('_', ' ')}"
        f"{'' if sampling.is_greedy else f', seed {request.sampling.seed}'}",
        err=True,
    )
