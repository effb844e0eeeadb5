"""The parts of the demo by themselves."""

import math
import random
from dataclasses import replace
from itertools import islice
from types import SimpleNamespace

import pytest
import torch

from adaptive_spec.config import load_adaptive_config
from adaptive_spec.demo.compare import MAX_TIE_GAP, TieJudge, compare_outputs, first_difference
from adaptive_spec.demo.modes import MEASURED_CONFIG, parse_modes
from adaptive_spec.demo.origins import OriginTracker
from adaptive_spec.demo.report import best_ratio, steps_over_time
from adaptive_spec.demo.runner import PhaseRun, turn_order
from adaptive_spec.demo.workload import Phase, Workload, parse_phases, scaled
from adaptive_spec.engine.engine import Engine
from adaptive_spec.engine.loading import load_pair
from adaptive_spec.engine.sampling import GREEDY, SamplingParams
from adaptive_spec.row_choice_ref import RowRule, choose
from adaptive_spec.testing.models import agreeing_pair, greedy_reference


def request(prompt_ids, output_ids, sampling=GREEDY):
    return SimpleNamespace(prompt_ids=prompt_ids, output_ids=output_ids, sampling=sampling)


class FixedGap:
    def __init__(self, gap):
        self.value, self.asked = gap, []

    def gap(self, token_ids, tokens, sampling):
        self.asked.append((list(token_ids), list(tokens), sampling))
        return self.value


def test_a_planted_difference_is_found_where_it_is():
    judge = FixedGap(MAX_TIE_GAP / 2)
    rule = SamplingParams(temperature=0.5, seed=3)
    outputs = {
        "none": [[request([7], [1, 2, 3])], [request([8], [4, 5, 6], rule), request([9], [1])]],
        "S=3": [[request([7], [1, 2, 3, 4])], [request([8], [4, 9, 6]), request([9], [1])]],
    }
    comparison = compare_outputs(outputs, "none", judge)
    (found,) = comparison.differences
    assert (found.mode, found.phase, found.request, found.position) == ("S=3", 1, 0, 1)
    assert (found.reference_token, found.token) == (5, 9)
    assert judge.asked == [([8, 4], [5, 9], rule)]
    assert comparison.num_outputs == 3
    assert comparison.identical_share == pytest.approx(2 / 3)
    # Up to where they part: 3, 1 and 1 tokens.
    assert comparison.num_tokens == 5
    assert comparison.lossless


@pytest.mark.parametrize("gap", [MAX_TIE_GAP, 0.5, float("nan")])
def test_a_planted_gap_is_a_fault(gap):
    outputs = {"none": [[request([7], [1, 2])]], "adaptive": [[request([7], [1, 3])]]}
    assert not compare_outputs(outputs, "none", FixedGap(gap)).lossless


def test_the_judge_measures_both_tokens_against_the_best_logit():
    pair = agreeing_pair(dtype=torch.float32)
    prompt = [3, 1, 4]
    hidden = pair.target(torch.tensor([prompt]), torch.arange(3).unsqueeze(0))
    logits = pair.target.logits(hidden[0, -1]).double()
    first, second, third = logits.topk(3).indices.tolist()
    judge = TieJudge(pair.target)
    assert judge.gap(prompt, (first, first)) == 0
    for tokens in ((first, second), (second, first)):
        assert judge.gap(prompt, tokens) == pytest.approx(
            float(logits[first] - logits[second]), abs=1e-4
        )
    # Near the best or not: neither token is the target's choice, so neither may pass as a tie.
    assert judge.gap(prompt, (third, second)) == pytest.approx(
        float(logits[first] - logits[third]), abs=1e-4
    )
    assert pair.target.embedding.dtype == torch.float32


@pytest.fixture(scope="module")
def judged():
    """A judge and, as the ops see them, the target's logits behind some prompts."""
    pair = agreeing_pair(dtype=torch.float32)
    rng = random.Random(5)
    rows = []
    for _ in range(40):
        prompt = [rng.randrange(pair.target.config.vocab_size) for _ in range(rng.randint(1, 9))]
        with torch.inference_mode():
            hidden = pair.target(torch.tensor([prompt]), torch.arange(len(prompt)).unsqueeze(0))
            rows.append((prompt, pair.target.logits(hidden[0, -1])))
    return TieJudge(pair.target), rows


@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 1.0), (1.0, 0.9), (3.0, 0.6)])
def test_the_judge_of_a_sampled_token_asks_for_the_one_that_the_op_draws(
    judged, temperature, top_p
):
    judge, rows = judged
    num_other = 0
    for seed, (prompt, logits) in enumerate(rows):
        sampling = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
        rule = RowRule(seed=seed, temperature=temperature, top_p=top_p)
        drawn, _ = choose(logits.numpy(), rule, len(prompt) - 1)
        assert judge.gap(prompt, [drawn], sampling) == 0
        probs = (logits.double() / temperature).softmax(-1)
        for token in {*range(0, len(logits), 7)} - {drawn}:
            gap = judge.gap(prompt, [drawn, token], sampling)
            assert gap > 0
            above = float(probs[probs > probs[token]].sum())
            if abs(above - top_p) > 1e-3:
                assert (gap == math.inf) == (above > top_p)
        num_other += judge.gap(prompt, [drawn], replace(sampling, seed=seed + 1000)) > 0
    assert num_other > len(rows) // 4, "the judge passes what another seed would draw"


def test_jobs_sample_with_seeds_of_their_own_and_the_same_in_every_mode(pair_dir):
    pair = load_pair(pair_dir)
    texts = {"easy": ["one", "two"], "hard": ["three"]}
    rule = SamplingParams(temperature=0.5, top_p=0.9)
    phases = [Phase(1, "easy", 10), Phase(1, "easy", 10)]
    workload = Workload(pair, texts, phases, 8, seed=1, sampling=rule)
    # Also where the prompts come round again.
    drawn = [[job.sampling for job in islice(workload.jobs(phase), 5)] for phase in (0, 1, 0)]
    assert drawn[0] == drawn[2]
    assert all(replace(each, seed=None) == rule for each in drawn[0])
    assert len({each.seed for each in drawn[0] + drawn[1]}) == 10
    other = Workload(pair, texts, phases, 8, seed=2, sampling=rule)
    assert next(other.jobs(0)).sampling != drawn[0][0]


def test_first_difference_looks_at_the_common_length():
    assert first_difference([1, 2], [1, 2, 3]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([], [1]) is None


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_origins_tell_drafts_from_the_targets_own_tokens(steps):
    pair = agreeing_pair(0.3)
    engine = Engine(pair, max_batch_size=2, max_len=64, speculative_num_steps=steps)
    engine.submit([5, 6], 9)
    tracker = OriginTracker(engine.submit([1, 2, 3], 20))
    seen = []
    while not engine.idle:
        engine.step()
        seen += tracker.update()
    followed = tracker.request
    assert [token for token, _ in seen] == followed.output_ids
    assert followed.output_ids == greedy_reference(pair.target, [1, 2, 3], 20)
    assert tracker.accepted == [flag for _, flag in seen]
    assert not tracker.accepted[0]
    # The limit may cut the last round.
    assert 0 <= followed.num_correct_drafts - sum(tracker.accepted) <= steps
    own = len(tracker.accepted) - sum(tracker.accepted)
    assert followed.num_rounds <= own <= followed.num_rounds + 1


def test_phases_are_parsed_and_scaled():
    phases = parse_phases("1:easy:100, 16:hard:50")
    assert phases == (Phase(1, "easy", 100), Phase(16, "hard", 50))
    assert scaled(phases, 0.1) == (Phase(1, "easy", 10), Phase(16, "hard", 16))


@pytest.mark.parametrize("text", ["", "1", "1:easy:", "1:easy:-5", "²:easy:5", "1:easy:5:6"])
def test_phases_that_are_wrong_are_refused(text):
    with pytest.raises(ValueError, match="--phases: expected"):
        parse_phases(text)


def test_static_means_every_candidate_of_the_adaptive_modes():
    table = load_adaptive_config({"1": {"candidate_steps": [0, 2]}, "4": {"candidate_steps": [5]}})
    names = [mode.name for mode in parse_modes("none,static,adaptive", table)]
    assert names == ["none", "S=2", "S=5", "adaptive"]
    names = [mode.name for mode in parse_modes("built-in,adaptive,static", table)]
    assert names == ["none", "S=1", "S=2", "S=3", "S=5", "S=7", "built-in", "adaptive"]
    assert [mode.name for mode in parse_modes("4,4,none", table)] == ["none", "S=4"]


def test_the_measured_table_loads():
    load_adaptive_config(MEASURED_CONFIG)


def test_steps_over_time_shows_each_stretch():
    assert steps_over_time([3] * 12 + [7] * 12, width=4) == "3377"
    assert steps_over_time([1, 10, 64]) == "1a+"
    assert steps_over_time([]) == ""


def test_settling_is_counted_to_the_steps_of_most_rounds():
    run = PhaseRun(steps=[3, 3, 1, 7, 7, 7, 7, 3])
    assert (run.main_steps, run.rounds_to_settle, run.num_switches) == (7, 3, 3)


def test_ratio_is_against_the_best_rival():
    assert best_ratio(3.0, [1.0, 2.0]) == 1.5
    assert best_ratio(3.0, []) is None


def test_turns_rotate_so_that_no_lane_always_goes_first():
    lanes = list("abcd")
    orders = [turn_order(lanes, turn) for turn in range(8)]
    assert all(sorted(order) == lanes for order in orders)
    for position in range(4):
        counts = [sum(order[position] == lane for order in orders) for lane in lanes]
        assert counts == [2, 2, 2, 2]
