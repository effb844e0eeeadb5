"""Sampling from logits follows the target's distribution: tests with a stated false-alarm rate.

As in test_sampling_distribution.py: random Markov chains, exact expectations, and a false alarm of
all tests of this file together with probability 1e-4 (Bonferroni). Here the target's distribution
is what temperature and filters make of its logits, computed in float64.
"""

import adaptive_spec_ext
import pytest
import torch

from adaptive_spec import noise_ref
from adaptive_spec.noise_ref import Kind
from tests.ops.logits_rounds import Rule, sample, shared_noise_agreement, verify_chains
from tests.ops.markov_pairs import Pair, beside_expected, observe, p_value, survival

FALSE_ALARM_RATE = 1e-4
NUM_PAIRS = 50
NUM_TREES = 10
# Per pair: first token, first two tokens, accepted drafts, both with draft probabilities and with
# shared noise. The same three per tree. Single tokens and twos of rounds in a row, with and without
# drafts. First and first two tokens with streams that differ.
ALPHA = FALSE_ALARM_RATE / (6 * NUM_PAIRS + 3 * NUM_TREES + 2 * 2 + 2)

RULES = [
    Rule(),
    Rule(temperature=0.6),
    Rule(temperature=1.7, top_k=3),
    Rule(top_p=0.8),
    Rule(min_p=0.1),
    Rule(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DRAFT_STREAM = 1
MAX_LENGTH = 16


class LogitsPair(Pair):
    """One whose rounds are verified with logits."""

    def __init__(self, seed: int) -> None:
        # Large ones would take most of the time.
        super().__init__(seed, large_one_in=10)
        self.rule = RULES[seed % len(RULES)]
        dtype = DTYPES[seed % len(DTYPES)]
        if self.vocab_size > 12:
            self.num_steps, dtype = min(self.num_steps, 2), torch.bfloat16
        self.logits = self.target.log().to(dtype)
        self.draft_logits = self.draft.log()
        self.target_law = self.rule.probs(self.logits)
        # One seed and many places in sequences, or the other way round.
        self.has_one_seed = seed % 2 == 1

    def noise(self, samples: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Seeds and positions."""
        if self.has_one_seed:
            return torch.full_like(samples, -3), MAX_LENGTH * samples + depth
        return 1000 + samples, torch.full_like(samples, 77 + depth)

    def draft_with_noise(
        self, root: torch.Tensor, noise: tuple, num_steps: int, **arguments
    ) -> torch.Tensor:
        """The root and drafts [n, num_steps + 1] that the op samples from the draft's logits."""
        seeds, positions = noise
        tokens = [root]
        for i in range(num_steps):
            logits = self.draft_logits[tokens[-1]]
            tokens.append(sample(logits, seeds, positions + i, **arguments))
        return torch.stack(tokens, 1)

    def verify_with_draft_probs(
        self, samples: torch.Tensor, root: torch.Tensor, depth: int, num_steps: int, fault: str = ""
    ) -> torch.Tensor:
        seeds, positions = self.noise(
            samples, 0 if fault == "positions that stand still" else depth
        )
        if fault == "one seed and position for all":
            seeds, positions = seeds * 0, positions * 0
        noise = seeds, positions
        if fault == "drafts by the numbers that accept them":
            chain = self.draft_with_coins(root, noise, num_steps)
        else:
            chain = self.draft_with_noise(root, noise, num_steps, noise_stream=DRAFT_STREAM)
        draft_probs = self.draft[chain[:, :-1]]
        if fault == "probabilities that were not sampled from":
            draft_probs = (draft_probs**2).div((draft_probs**2).sum(-1, keepdim=True))
        return verify_chains(
            chain[:, 1:],
            self.logits[chain],
            *noise,
            draft_probs=draft_probs,
            **self.rule.arguments(len(root)),
        )

    def draft_with_coins(self, root: torch.Tensor, noise: tuple, num_steps: int) -> torch.Tensor:
        """Drafts drawn by inversion with what verification will take for its coins."""
        seeds, positions = (part.numpy() for part in noise)
        below = self.draft.cumsum(-1)
        tokens = [root]
        for i in range(num_steps):
            words = noise_ref.noise_words(seeds, positions + i, 0, Kind.COIN, 1)
            coins = torch.from_numpy(noise_ref.uniform(words))
            drawn = torch.searchsorted(below[tokens[-1]], coins, right=True)
            tokens.append(drawn.squeeze(1).clamp(max=self.vocab_size - 1))
        return torch.stack(tokens, 1)

    def verify_with_shared_noise(
        self, samples: torch.Tensor, root: torch.Tensor, depth: int, num_steps: int, fault: str = ""
    ) -> torch.Tensor:
        noise = self.noise(samples, 0 if fault == "positions that stand still" else depth)
        stream = DRAFT_STREAM if fault == "streams that differ" else 0
        chain = self.draft_with_noise(root, noise, num_steps, noise_stream=stream)
        rule = self.rule.arguments(len(root))
        return verify_chains(chain[:, 1:], self.logits[chain], *noise, **rule)

    def expect_with_draft_probs(self) -> list[float]:
        return survival(torch.minimum(self.target_law, self.draft.double()), self.num_steps)

    def expect_with_shared_noise(self) -> list[float]:
        agreement = shared_noise_agreement(self.target_law, self.draft.double())
        return survival(agreement, self.num_steps)

    def run(self, mode: str, *fault: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        verify, expect = {
            "draft probabilities": (self.verify_with_draft_probs, self.expect_with_draft_probs),
            "shared noise": (self.verify_with_shared_noise, self.expect_with_shared_noise),
        }[mode]
        observed = observe(lambda *round_: verify(*round_, *fault), self.vocab_size, self.num_steps)
        return beside_expected(observed, self.target_law, expect())


@pytest.mark.parametrize("mode", ["draft probabilities", "shared noise"])
@pytest.mark.parametrize("seed", range(NUM_PAIRS))
def test_chains_follow_the_target(seed, mode):
    for name, (observed, expected) in LogitsPair(seed).run(mode).items():
        assert p_value(observed, expected) > ALPHA, name


@pytest.mark.parametrize(
    "fault",
    [
        "drafts by the numbers that accept them",
        "probabilities that were not sampled from",
        "positions that stand still",
        "one seed and position for all",
    ],
)
def test_faults_show_with_draft_probs(fault):
    """The tests above would be worthless if they passed these."""
    found = LogitsPair(6).run("draft probabilities", fault).values()
    assert min(p_value(*each) for each in found) < ALPHA


@pytest.mark.parametrize("fault", ["positions that stand still", "streams that differ"])
def test_faults_show_with_shared_noise(fault):
    """Other noise emits what it should, but accepts less; that alone shows it."""
    found = LogitsPair(6).run("shared noise", fault)
    if fault == "streams that differ":
        assert p_value(*found.pop("accepted drafts")) < ALPHA
        for name, (observed, expected) in found.items():
            assert p_value(observed, expected) > ALPHA, name
    else:
        assert min(p_value(*each) for each in found.values()) < ALPHA


class TreePair(LogitsPair):
    """One that drafts the same tree everywhere: some first tokens, and two behind each of them."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.num_steps = 2
        width = min(3, self.vocab_size)

        def distinct_tokens(count: int) -> list[int]:
            return torch.randperm(self.vocab_size, generator=self.generator)[:count].tolist()

        firsts = distinct_tokens(width)
        self.children = {token: distinct_tokens(2) for token in firsts}
        leaves = [token for first in firsts for token in self.children[first]]
        self.tokens = torch.tensor([0, *firsts, *leaves])
        first_leaves = list(range(width + 1, len(self.tokens), 2))
        self.first_child = torch.tensor([1, *first_leaves] + [-1] * len(leaves))
        siblings = [*range(2, width + 1), -1]
        for leaf in first_leaves:
            siblings += [leaf + 1, -1]
        self.next_sibling = torch.tensor([-1, *siblings])
        self.depths = torch.tensor([0] + [1] * width + [2] * len(leaves))

    def verify_tree(
        self, samples: torch.Tensor, root: torch.Tensor, depth: int, num_steps: int
    ) -> torch.Tensor:
        seeds, positions = self.noise(samples, depth)
        rule = self.rule.arguments(len(root))
        if depth > 0:
            return sample(self.logits[root], seeds, positions, **rule)[:, None]
        size, num_nodes = len(root), len(self.tokens)
        predicts = torch.empty(size * num_nodes, dtype=torch.int32)
        accept_index = torch.zeros(size, num_steps + 1, dtype=torch.int32)
        counts = torch.empty(size, dtype=torch.int32)
        adaptive_spec_ext.verify_tree_sampling_from_logits(
            predicts,
            accept_index,
            counts,
            self.tokens.expand(size, -1),
            torch.arange(size * num_nodes).view(size, num_nodes),
            self.first_child.expand(size, -1),
            self.next_sibling.expand(size, -1),
            self.logits[self.tokens].expand(size, -1, -1),
            seeds,
            positions[:, None] + self.depths,
            **rule,
        )
        emitted = predicts[accept_index.long()]
        return emitted.masked_fill(torch.arange(num_steps + 1) > counts[:, None], -1)

    def expect_of_tree(self) -> list[float]:
        law = self.target_law
        depth_1 = sum(law[0, first] for first in self.children)
        depth_2 = sum(
            law[0, first] * law[first, self.children[first]].sum() for first in self.children
        )
        return [1.0, float(depth_1), float(depth_2)]


@pytest.mark.parametrize("seed", range(NUM_TREES))
def test_trees_follow_the_target(seed):
    """Whichever siblings were drafted: each is accepted with its own probability."""
    pair = TreePair(3000 + seed)
    observed = observe(pair.verify_tree, pair.vocab_size, pair.num_steps)
    found = beside_expected(observed, pair.target_law, pair.expect_of_tree())
    for name, (seen, expected) in found.items():
        assert p_value(seen, expected) > ALPHA, name


@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_request_draws_anew_in_each_round(num_steps):
    """Case 19: 1000 calls whose only change are the sequence lengths that the op itself counts up,
    as in a replayed graph. With noise that stands still, all would draw the same quantile."""
    size, num_requests = 8, 16
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(size, generator=generator)
    seq_lens = 10 * torch.arange(num_requests)
    emitted: list[list[int]] = [[] for _ in range(num_requests)]
    for _ in range(1000):
        output = verify_chains(
            torch.randint(size, (num_requests, num_steps), generator=generator),
            logits.expand(num_requests, num_steps + 1, size),
            torch.arange(num_requests),
            seq_lens,
            seq_lens=seq_lens,
            new_seq_lens=seq_lens,
        )
        for tokens, row in zip(emitted, output.tolist(), strict=True):
            tokens += [token for token in row if token >= 0]
    assert seq_lens.tolist() == [10 * b + len(tokens) for b, tokens in enumerate(emitted)]
    law = logits.double().softmax(-1)
    joint = torch.zeros(size * size)
    for tokens in emitted:
        pairs = torch.tensor(tokens[: len(tokens) // 2 * 2]).view(-1, 2)
        joint += torch.bincount(pairs @ torch.tensor([size, 1]), minlength=size * size)
    assert p_value(joint.view(size, size).sum(1), law) > ALPHA
    assert p_value(joint, (law[:, None] * law).flatten()) > ALPHA
