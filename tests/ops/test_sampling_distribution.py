"""Verification by sampling follows the target's distribution: tests with a stated false-alarm rate.

Target and draft are random Markov chains, so what is expected can be computed exactly. All tests of
this file together raise a false alarm with probability 1e-4 (Bonferroni); their seeds are fixed, so
a run that has passed passes again.
"""

import adaptive_spec_ext
import numpy as np
import pytest
import torch

from tests.ops.markov_pairs import (
    CHUNK,
    NUM_SAMPLES,
    Pair,
    beside_expected,
    observe,
    p_value,
    survival,
)

FALSE_ALARM_RATE = 1e-4
NUM_PAIRS = 50
# Per pair: first token, first two tokens, accepted drafts, both by token and by block; and a tree's
# first token.
ALPHA = FALSE_ALARM_RATE / (8 * NUM_PAIRS)


class SampledPair(Pair):
    """One whose rounds are verified with probabilities and coins."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.draft_below = self.draft.cumsum(-1)

    def draft_behind(self, tokens: torch.Tensor) -> torch.Tensor:
        """By inversion, which is much faster than torch.multinomial."""
        below = self.draft_below[tokens]
        drawn = torch.searchsorted(below, self.uniform(len(tokens), 1), right=True).squeeze(1)
        return drawn.clamp(max=self.vocab_size - 1)

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

        def verify(
            samples: torch.Tensor, root: torch.Tensor, depth: int, num_steps: int
        ) -> torch.Tensor:
            # A fault is that of the first round.
            return self.verify(root, num_steps, fault="" if depth else fault, block=block)

        observed = observe(verify, self.vocab_size, self.num_steps)
        target, draft = self.target.double(), self.draft.double()
        if block:
            return beside_expected(observed, target, self.block_survival())
        at_least = survival(torch.minimum(target, draft), self.num_steps)
        return beside_expected(observed, target, at_least)

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
        return [float(ends[k:].sum()) for k in range(steps + 1)]


@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_chains_follow_the_target(seed):
    for name, (observed, expected) in SampledPair(seed).observe().items():
        assert p_value(observed, expected) > ALPHA, name


def small_pair(seed: int) -> SampledPair:
    """One whose chains of drafts can all be listed."""
    pair = SampledPair(seed)
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
    by_token = sum(survival(torch.minimum(target, draft), pair.num_steps)[1:])
    by_block = sum(pair.block_survival()[1:])
    assert by_block >= by_token - 1e-6


def test_the_papers_example():
    """Target (1/3, 2/3), draft (2/3, 1/3), two drafts: 10/9 by token, 11/9 by block."""
    pair = SampledPair(1)
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
    found = SampledPair(1).observe(fault=fault).values()
    assert min(p_value(*each) for each in found) < ALPHA


@pytest.mark.parametrize("seed", range(10))
def test_trees_follow_the_target(seed):
    """Siblings that were drawn without looking are accepted with their own probability each."""
    pair = SampledPair(1000 + seed)
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
