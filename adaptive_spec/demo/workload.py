"""The demo's workload: phases of constant batch size and kind of text, each with a stream of jobs.

A phase keeps exactly its batch size running: whenever a request ends, the next job joins. The jobs
of a phase come in the same order in every mode, so all modes decode the same requests.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from adaptive_spec.demo.pair import TINY_PAIR
from adaptive_spec.engine.engine import Engine
from adaptive_spec.engine.sampling import GREEDY, SamplingParams

if TYPE_CHECKING:
    from adaptive_spec.engine.loading import ModelPair

REGIMES = ("easy", "hard")
MAX_PROMPT_TOKENS = 96


@dataclass(frozen=True)
class Phase:
    """``num_tokens`` decoded tokens (per mode) at one batch size, from one kind of text."""

    batch_size: int
    regime: str
    num_tokens: int

    @property
    def name(self) -> str:
        return f"B={self.batch_size} {self.regime}"


@dataclass(frozen=True)
class Job:
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = GREEDY


# About equal time for each on two cores.
DEFAULT_PHASES = (
    Phase(1, "easy", 1200),
    Phase(1, "hard", 900),
    Phase(4, "easy", 2500),
    Phase(4, "hard", 2000),
    Phase(16, "easy", 3500),
    Phase(16, "hard", 3000),
    Phase(32, "hard", 4000),
    Phase(1, "easy", 1200),
)


def parse_phases(text: str) -> tuple[Phase, ...]:
    """Phases from ``BATCH:REGIME:TOKENS,...``, for example ``1:easy:2000,16:hard:5000``.

    Raises ValueError quoting the part that is wrong.
    """
    phases = []
    for part in text.split(","):
        fields = part.strip().split(":")
        numbers = [fields[i] for i in (0, 2) if i < len(fields)]
        if (
            len(fields) != 3
            or fields[1] not in REGIMES
            or not all(n.isascii() and n.isdigit() and int(n) > 0 for n in numbers)
        ):
            raise ValueError(
                f"--phases: expected BATCH:easy|hard:TOKENS with positive integers, got {part!r}"
            )
        phases.append(Phase(int(fields[0]), fields[1], int(fields[2])))
    return tuple(phases)


def scaled(phases: Sequence[Phase], factor: float) -> tuple[Phase, ...]:
    """The same phases with ``factor`` times the tokens."""
    return tuple(
        Phase(p.batch_size, p.regime, max(p.batch_size, round(p.num_tokens * factor)))
        for p in phases
    )


def read_prompts(directory: Path | None) -> dict[str, list[str]]:
    """The pair's held-out prompts by kind of text; a pair without its own gets the shipped ones."""
    path = (directory or TINY_PAIR) / "prompts.json"
    if not path.is_file():
        path = TINY_PAIR / "prompts.json"
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if isinstance(prompts, dict):
        # Beside the prompts the file says where they are from.
        prompts = {kind: texts for kind, texts in prompts.items() if isinstance(texts, list)}
    if (
        not isinstance(prompts, dict)
        or len(prompts) < 2
        or not all(
            texts and all(text and isinstance(text, str) for text in texts)
            for texts in prompts.values()
        )
    ):
        raise ValueError(
            f"{path}: expected an object with lists of prompts for two or more kinds of text"
        )
    return prompts


def measure_kinds(
    pair: ModelPair,
    prompts: Mapping[str, Sequence[str]],
    steps: int,
    sampling: SamplingParams = GREEDY,
    num_tokens: int = 96,
) -> dict[str, float]:
    """Mean accepted drafts per request and round at S = ``steps`` on a few prompts of each kind.

    All are decoded with the one ``sampling``.
    """
    means = {}
    for kind, texts in prompts.items():
        jobs = [encode(pair, text, num_tokens) for text in texts[:16]]
        engine = Engine(
            pair,
            max_batch_size=len(jobs),
            max_len=pair.target.config.max_position_embeddings,
            speculative_num_steps=steps,
        )
        requests = engine.generate([job.prompt_ids for job in jobs], num_tokens, sampling=sampling)
        rounds = sum(request.num_rounds for request in requests)
        means[kind] = sum(request.num_correct_drafts for request in requests) / max(rounds, 1)
    return means


def encode(pair: ModelPair, text: str, max_new_tokens: int) -> Job:
    """A job that fits the target's context, with the end of a prompt that is too long."""
    room = pair.target.config.max_position_embeddings - max_new_tokens
    if room < 1:
        raise ValueError(
            f"--max-new-tokens: expected fewer than the context of "
            f"{pair.target.config.max_position_embeddings} tokens, got {max_new_tokens}"
        )
    ids = pair.tokenizer.encode(text)[-min(room, MAX_PROMPT_TOKENS) :]
    return Job(ids, max_new_tokens)


class Workload:
    """Phases and the jobs that fill them.

    Args:
        pair: encodes the prompts.
        prompts: prompts of the two regimes, "easy" and "hard".
        phases: what to run, in order.
        max_new_tokens: longest output; each request's own limit lies between half of it and all.
        seed: of the order of prompts, of the limits, and of the requests' own seeds.
        sampling: how tokens are chosen.
    """

    def __init__(
        self,
        pair: ModelPair,
        prompts: Mapping[str, Sequence[str]],
        phases: Sequence[Phase],
        max_new_tokens: int,
        seed: int,
        sampling: SamplingParams = GREEDY,
    ) -> None:
        self.phases = tuple(phases)
        self.seed = seed
        self.sampling = sampling
        self._jobs: list[list[Job]] = []
        for index, phase in enumerate(self.phases):
            rng = random.Random(f"{seed} {index}")
            texts = list(prompts[phase.regime])
            rng.shuffle(texts)
            self._jobs.append(
                [
                    # Unequal lengths: requests then leave and join one by one, not in waves.
                    encode(pair, text, rng.randint((max_new_tokens + 1) // 2, max_new_tokens))
                    for text in texts
                ]
            )

    @property
    def max_batch_size(self) -> int:
        return max(phase.batch_size for phase in self.phases)

    @property
    def max_len(self) -> int:
        """Most tokens of any request, prompt and output."""
        return max(len(job.prompt_ids) + job.max_new_tokens for jobs in self._jobs for job in jobs)

    def jobs(self, phase_index: int) -> Iterator[Job]:
        """The phase's jobs, without end."""
        rng = random.Random(f"sampling {self.seed} {phase_index}")
        for job in cycle(self._jobs[phase_index]):
            yield replace(job, sampling=replace(self.sampling, seed=rng.getrandbits(63)))
