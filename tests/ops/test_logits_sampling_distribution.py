"""Sampling from logits follows the target's distribution: tests with a stated false-alarm rate.

As in test_sampling_distribution.py: random Markov chains, exact expectations, and a false alarm of
all tests of this file together with probability 1e-4 (Bonferroni). Here the target's distribution
is what temperature and filters make of its logits, computed in float64.
"""

import pytest
import torch

from adaptive_spec import noise_ref
from adaptive_spec.noise_ref import Kind
from tests.ops.logits_rounds import Rule, sample, shared_noise_agreement, verify_chains
from tests.ops.markov_pairs import Pair, beside_expected, observe, p_value, survival

FALSE_ALARM_RATE = 1e-4
NUM_PAIRS = 50
# Per pair: first token, first two tokens, accepted drafts, both with draft probabilities and with
# shared noise; and as many for trees.
ALPHA = FALSE_ALARM_RATE / (9 * NUM_PAIRS)

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
