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
# Per pair: first token, first two tokens, accepted drafts, both by token and by block; and a tree's
# first token.
ALPHA = FALSE_ALARM_RATE / (8 * NUM_PAIRS)
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

    def verify(
        self, root: torch.Tensor, num_steps: int, *, fault: str = "", block: bool = False
    ) -> torch.Tensor:
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
            block_verification=block,
        )
        return output

    def observe(
        self, *, fault: str = "", block: bool = False
    ) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """(observed counts, expected probabilities) of what the rounds emitted, by name."""
        size, steps = self.vocab_size, self.num_steps
        joint = torch.zeros(size * size)
        lengths = torch.zeros(steps + 1)
        for _ in range(NUM_SAMPLES // CHUNK):
            root = torch.zeros(CHUNK, dtype=torch.long)
            output = self.verify(root, steps, fault=fault, block=block)
            accepted = (output >= 0).sum(1) - 1
            lengths += torch.bincount(accepted, minlength=steps + 1)
            first, second = output[:, 0].long(), output[:, 1].long()
            # Where the round ended with its first token, the next round brings the second.
            ended = second < 0
            second[ended] = self.verify(first[ended], 1, block=block)[:, 0].long()
            joint += torch.bincount(first * size + second, minlength=size * size)
        target, draft = self.target.double(), self.draft.double()
        reached = torch.zeros(size, dtype=torch.double)
        reached[0] = 1
        at_least = [1.0]
        for _ in range(steps):
            reached = reached @ torch.minimum(target, draft)
            at_least.append(float(reached.sum()))
        if block:
            at_least = self.block_survival()
        exactly = torch.tensor([*at_least, 0.0], dtype=torch.double)
        return {
            "first token": (joint.view(size, size).sum(1), target[0]),
            "first two tokens": (joint, (target[0][:, None] * target).flatten()),
            "accepted drafts": (lengths, exactly[:-1] - exactly[1:]),
        }

    def block_survival(self) -> list[float]:
        """P(at least k drafts are accepted) for k = 0 .. S under block verification.

        Summed over all chains of drafts: a chain that reaches token x after k drafts with joint
        ratio r is accepted at least that far if position k passes or a later one does.
        """
        target, draft = self.target.double().numpy(), self.draft.double().numpy()
        steps = self.num_steps

        def passes(k: int, ratio: float, token: int) -> float:
            if k == steps:
                return ratio
            rest = np.maximum(ratio * target[token] - draft[token], 0).sum()
            return rest / (rest + 1 - ratio) if rest + 1 - ratio > 0 else 0.0

        survival = [0.0] * (steps + 1)

        def walk(k: int, ratio: float, token: int, weight: float) -> list[float]:
            """P(the last position that passes is j), j = k .. S, times `weight`."""
            later = np.zeros(steps + 1)
            if k < steps:
                for x in range(self.vocab_size):
                    if draft[token, x] > 0:
                        joint = min(1.0, ratio * target[token, x] / draft[token, x])
                        later += walk(k + 1, joint, x, weight * draft[token, x])
            rest = weight - later[k + 1 :].sum()
            later[k] = rest * (1.0 if k == 0 else passes(k, ratio, token))
            return later

        ends = walk(0, 1.0, 0, 1.0)
        for k in range(steps + 1):
            survival[k] = float(ends[k:].sum())
        return survival


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


def small_pair(seed: int) -> Pair:
    """One whose chains of drafts can all be listed."""
    pair = Pair(seed)
    while pair.vocab_size**pair.num_steps > 3000:
        pair.num_steps -= 1
    return pair


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_blocks_follow_the_target_too(seed):
    for name, (observed, expected) in small_pair(2000 + seed).observe(block=True).items():
        assert p_value(observed, expected) > ALPHA, name


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_a_block_accepts_at_least_as_much(seed):
    """Exactly, by listing all chains; more than token by token on most pairs."""
    pair = small_pair(3000 + seed)
    target, draft = pair.target.double(), pair.draft.double()
    reached = torch.zeros(pair.vocab_size, dtype=torch.double)
    reached[0] = 1
    by_token = 0.0
    for _ in range(pair.num_steps):
        reached = reached @ torch.minimum(target, draft)
        by_token += float(reached.sum())
    by_block = sum(pair.block_survival()[1:])
    assert by_block >= by_token - 1e-6


def test_the_papers_example():
    """Target (1/3, 2/3), draft (2/3, 1/3), two drafts: 10/9 by token, 11/9 by block."""
    pair = Pair(1)
    pair.vocab_size, pair.num_steps = 2, 2
    pair.target = torch.tensor([[1 / 3, 2 / 3]]).expand(2, 2).contiguous()
    pair.draft = torch.tensor([[2 / 3, 1 / 3]]).expand(2, 2).contiguous()
    pair.draft_below = pair.draft.cumsum(-1)
    assert sum(pair.block_survival()[1:]) == pytest.approx(11 / 9)
    for block, expected in ((False, 10 / 9), (True, 11 / 9)):
        output = pair.verify(torch.zeros(NUM_SAMPLES, dtype=torch.long), 2, block=block)
        mean = float((output >= 0).sum(1).double().mean() - 1)
        assert abs(mean - expected) < 5 / NUM_SAMPLES**0.5
    for observed, right in pair.observe(block=True).values():
        assert p_value(observed, right) > ALPHA


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
