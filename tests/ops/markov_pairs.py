"""What tests of distributions share: random pairs of a target and a draft, what rounds between them
emit, and how far that is from what it should be."""

from collections.abc import Callable

import numpy as np
import torch

NUM_SAMPLES = 200_000
CHUNK = 20_000


class Pair:
    """A target and a draft over V tokens, each row of which is a distribution of the next one."""

    def __init__(self, seed: int, *, large_one_in: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size = int(rng.integers(2, 65 if seed % large_one_in == 0 else 13))
        self.num_steps = int(rng.integers(1, 6))
        shape = (self.vocab_size, self.vocab_size)
        concentration = rng.choice([0.1, 1.0, 10.0])
        target = rng.dirichlet(np.full(shape[0], concentration), shape[0])
        noise = rng.dirichlet(np.full(shape[0], concentration), shape[0])
        share = rng.uniform(0.05, 1.0)
        self.target = torch.from_numpy(target).float()
        self.draft = torch.from_numpy((1 - share) * target + share * noise).float()

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)


#: (samples, root, depth, num_steps) -> tokens. One round of each of the samples [n], behind its
#: token `root` [n], which is number `depth` behind the one it began with: the emitted tokens [n,
#: num_steps + 1], -1 behind them.
Round = Callable[[torch.Tensor, torch.Tensor, int, int], torch.Tensor]


def observe(verify: Round, vocab_size: int, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
    """How often rounds behind token 0 brought each two tokens [V, V], and accepted drafts [S + 1].

    Where a round ends with its first token, the next one brings the second.
    """
    joint = torch.zeros(vocab_size * vocab_size)
    lengths = torch.zeros(num_steps + 1)
    for start in range(0, NUM_SAMPLES, CHUNK):
        samples = torch.arange(start, start + CHUNK)
        output = verify(samples, torch.zeros(CHUNK, dtype=torch.long), 0, num_steps)
        lengths += torch.bincount((output >= 0).sum(1) - 1, minlength=num_steps + 1)
        first, second = output[:, 0].long(), output[:, 1].long()
        ended = second < 0
        second[ended] = verify(samples[ended], first[ended], 1, 1)[:, 0].long()
        joint += torch.bincount(first * vocab_size + second, minlength=len(joint))
    return joint.view(vocab_size, vocab_size), lengths


def survival(agreement: torch.Tensor, num_steps: int) -> list[float]:
    """P(at least k drafts are accepted), k = 0 .. S, from agreement [V, V]: the probability that a
    token follows another and is an accepted draft."""
    reached = torch.zeros(len(agreement), dtype=torch.double)
    reached[0] = 1
    at_least = [1.0]
    for _ in range(num_steps):
        reached = reached @ agreement
        at_least.append(float(reached.sum()))
    return at_least


def beside_expected(
    observed: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor, at_least: list[float]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """What `observe` saw beside the probabilities of a target [V, V] and of accepted drafts."""
    joint, lengths = observed
    survives = torch.tensor([*at_least, 0.0], dtype=torch.double)
    return {
        "first token": (joint.sum(1), target[0]),
        "first two tokens": (joint.flatten(), (target[0][:, None] * target).flatten()),
        "accepted drafts": (lengths, survives[:-1] - survives[1:]),
    }


def p_value(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Of Pearson's test; outcomes expected fewer than ten times are taken together."""
    observed, expected = observed.double(), expected.double()
    expected = expected / expected.sum() * observed.sum()
    rare = expected < 10
    if rare.any():
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    if bool((observed[expected < 1e-3] > 5).any()):
        return 0.0
    usable = expected >= 1e-3
    statistic = ((observed - expected)[usable] ** 2 / expected[usable]).sum()
    degrees = int(usable.sum()) - 1
    if degrees == 0:
        return 1.0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2).double(), statistic / 2))
