"""Verification by sampling follows the target's distribution: tests with a stated false-alarm rate.

Target and draft are random Markov chains, so what is expected can be computed exactly. All tests of
this file together raise a false alarm with probability 1e-4 (Bonferroni); their seeds are fixed, so
a run that has passed passes again.
"""

import adaptive_spec_ext
import numpy as np
import pytest
import torch

FALSE_ALARM_RATE = 1e-4
NUM_PAIRS = 50
# Per pair: first token, first two tokens, accepted drafts; and a tree's first token.
ALPHA = FALSE_ALARM_RATE / (4 * NUM_PAIRS)
NUM_SAMPLES = 200_000
CHUNK = 20_000


class Pair:
    """A target and a draft over V tokens, each row of which is a distribution of the next one."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab_size = int(rng.integers(2, 65)) if seed % 5 == 0 else int(rng.integers(2, 13))
        self.num_steps = int(rng.integers(1, 6))
        shape = (self.vocab_size, self.vocab_size)
        concentration = rng.choice([0.1, 1.0, 10.0])
        target = rng.dirichlet(np.full(shape[0], concentration), shape[0])
        noise = rng.dirichlet(np.full(shape[0], concentration), shape[0])
        share = rng.uniform(0.05, 1.0)
        self.target = torch.from_numpy(target).float()
        self.draft = torch.from_numpy((1 - share) * target + share * noise).float()
        self.draft_below = self.draft.cumsum(-1)

    def draft_behind(self, tokens: torch.Tensor) -> torch.Tensor:
        """By inversion, which is much faster than torch.multinomial."""
        below = self.draft_below[tokens]
        drawn = torch.searchsorted(below, self.uniform(len(tokens), 1), right=True).squeeze(1)
        return drawn.clamp(max=self.vocab_size - 1)

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator)

    def verify(self, root: torch.Tensor, num_steps: int, *, fault: str = "") -> torch.Tensor:
        """One round behind the tokens `root` [n]: the emitted tokens, int32 [n, num_steps + 1]."""
        tokens = [root]
        for _ in range(num_steps):
            tokens.append(self.draft_behind(tokens[-1]))
        chain = torch.stack(tokens, 1)
        draft_probs = self.draft[chain[:, :-1]]
        if fault == "a draft distribution that was not sampled from":
            draft_probs = (draft_probs**2).div((draft_probs**2).sum(-1, keepdim=True))
        coins = self.uniform(len(root), num_steps)
        final = self.uniform(len(root))
        output = torch.empty(len(root), num_steps + 1, dtype=torch.int32)
        counts = torch.empty(len(root), dtype=torch.int32)
        if fault == "the coin that rejected draws again":
            final = coins[:, 0].clone()
        if fault == "draft and verification share their numbers":
            # The draft's number, where it was drawn by inversion, is known to lie in its interval.
            below = draft_probs.cumsum(-1).gather(-1, chain[:, 1:, None]).squeeze(-1)
            coins = (below - coins * draft_probs.gather(-1, chain[:, 1:, None]).squeeze(-1)).clamp(
                0
            )
        adaptive_spec_ext.verify_chain_sampling(
            None if fault == "a draft taken for certain" else draft_probs,
            chain[:, 1:].int(),
            self.target[chain],
            coins,
            final,
            output,
            counts,
        )
        return output

    def observe(self, *, fault: str = "") -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """(observed counts, expected probabilities) of what the rounds emitted, by name."""
        size, steps = self.vocab_size, self.num_steps
        joint = torch.zeros(size * size)
        lengths = torch.zeros(steps + 1)
        for _ in range(NUM_SAMPLES // CHUNK):
            root = torch.zeros(CHUNK, dtype=torch.long)
            output = self.verify(root, steps, fault=fault)
            accepted = (output >= 0).sum(1) - 1
            lengths += torch.bincount(accepted, minlength=steps + 1)
            first, second = output[:, 0].long(), output[:, 1].long()
            # Where the round ended with its first token, the next round brings the second.
            ended = second < 0
            second[ended] = self.verify(first[ended], 1)[:, 0].long()
            joint += torch.bincount(first * size + second, minlength=size * size)
        target, draft = self.target.double(), self.draft.double()
        reached = torch.zeros(size, dtype=torch.double)
        reached[0] = 1
        at_least = [1.0]
        for _ in range(steps):
            reached = reached @ torch.minimum(target, draft)
            at_least.append(float(reached.sum()))
        exactly = torch.tensor([*at_least, 0.0], dtype=torch.double)
        return {
            "first token": (joint.view(size, size).sum(1), target[0]),
            "first two tokens": (joint, (target[0][:, None] * target).flatten()),
            "accepted drafts": (lengths, exactly[:-1] - exactly[1:]),
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


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_chains_follow_the_target(seed):
    for name, (observed, expected) in Pair(seed).observe().items():
        assert p_value(observed, expected) > ALPHA, name


@pytest.mark.parametrize(
    "fault",
    [
        "the coin that rejected draws again",
        "a draft distribution that was not sampled from",
        "a draft taken for certain",
        "draft and verification share their numbers",
    ],
)
def test_faults_show(fault):
    """Each of these has been seen in the field; the tests above would be worthless if they passed
    it."""
    found = Pair(1).observe(fault=fault).values()
    assert min(p_value(*each) for each in found) < ALPHA


@pytest.mark.parametrize("seed", range(10))
def test_trees_follow_the_target(seed):
    """Siblings that were drawn without looking are accepted with their own probability each."""
    pair = Pair(1000 + seed)
    size, width = pair.vocab_size, min(4, pair.vocab_size)
    counts = torch.zeros(size)
    # A root with `width` distinct children, the same for all requests.
    children = torch.randperm(size, generator=pair.generator)[:width]
    num_nodes = width + 1
    for _ in range(NUM_SAMPLES // CHUNK):
        batch = torch.arange(CHUNK)[:, None]
        candidates = torch.cat([torch.zeros(1).long(), children]).expand(CHUNK, -1)
        first_child = torch.full((CHUNK, num_nodes), -1)
        first_child[:, 0] = 1
        sibling = torch.full((CHUNK, num_nodes), -1)
        sibling[:, 1:-1] = torch.arange(2, num_nodes)
        predicts = torch.zeros(CHUNK * num_nodes, dtype=torch.int32)
        adaptive_spec_ext.tree_speculative_sampling_target_only(
            predicts,
            torch.zeros(CHUNK, 2, dtype=torch.int32),
            torch.zeros(CHUNK, dtype=torch.int32),
            candidates,
            batch * num_nodes + torch.arange(num_nodes),
            first_child,
            sibling,
            pair.uniform(CHUNK, num_nodes),
            pair.uniform(CHUNK),
            pair.target[0].expand(CHUNK, num_nodes, size).contiguous(),
            torch.zeros(CHUNK, num_nodes, size),
        )
        counts += torch.bincount(predicts.view(CHUNK, num_nodes)[:, 0].long(), minlength=size)
    assert p_value(counts, pair.target[0]) > ALPHA
