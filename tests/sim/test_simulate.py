"""The simulator: against a slow loop of its own, and against what is known without simulating."""

import numpy as np
import pytest

from adaptive_spec import AdaptiveSpeculativeParams, CostTable
from adaptive_spec.sim.acceptance import Mixture, drifting, geometric
from adaptive_spec.sim.arrivals import Trace, constant
from adaptive_spec.sim.compare import group_shares, judge, regret, share_of_oracle
from adaptive_spec.sim.policies import is_static, policy_factories
from adaptive_spec.sim.simulate import (
    Phase,
    StaticPolicy,
    TraceOracle,
    best_steps,
    draw_phases,
    replay_oracle,
    replay_phases,
    replay_trace,
)

TABLE = CostTable.from_function(
    lambda b, s: 4.0 + 0.3 * s + 0.02 * b * (s + 1), [1, 4, 16, 64], range(8)
)
PHASES = [
    Phase(3, 150, Mixture([geometric(0.3), geometric(0.9)], [1, 1]), request_rounds=20),
    Phase(1, 301, geometric(0.9)),
    Phase(16, 130, geometric(0.2)),
    Phase(5, 64, geometric(0.97), others=geometric(0.1)),
]


class Dynamic(StaticPolicy):
    """A static policy that hides it, so that the loop over rounds runs."""

    def __new__(cls, steps):
        policy = AdaptiveSpeculativeParams(steps, {"1": {"candidate_steps": [steps]}})
        assert not isinstance(policy, StaticPolicy)
        return policy


def slow_replay(policy, drawn, table, lag=1, switch_ms=0.0):
    """The same in the plainest words."""
    steps, tokens, ms, late = [], [], [], []
    for each in drawn:
        batch = each.phase.batch_size
        for depths in each.depths.tolist():
            chosen = policy.get_steps_for_batch(batch)
            accepted = [min(depth, chosen) for depth in depths]
            late.append((accepted, batch, chosen))
            if len(late) == lag:
                policy.on_verify_complete(*late.pop(0))
            switched = bool(steps) and steps[-1] != chosen
            steps.append(chosen)
            tokens.append(sum(accepted) + batch)
            ms.append(table.cost(batch, chosen) + (switch_ms if switched else 0.0))
    return steps, tokens, ms


@pytest.mark.parametrize("lag", [1, 2, 3])
def test_the_fast_replay_equals_a_plain_loop(lag):
    drawn = draw_phases(PHASES, seed=1)
    run = replay_phases(AdaptiveSpeculativeParams(3), drawn, TABLE, lag=lag, switch_ms=0.5)
    steps, tokens, ms = slow_replay(AdaptiveSpeculativeParams(3), drawn, TABLE, lag, 0.5)
    assert run.steps.tolist() == steps
    assert run.tokens.tolist() == tokens
    assert run.ms.tolist() == pytest.approx(ms)
    assert len(set(steps)) > 1, "a case without a switch shows little"


@pytest.mark.parametrize("steps", [0, 3, 7])
def test_the_path_for_fixed_steps_equals_the_loop(steps):
    drawn = draw_phases(PHASES, seed=1)
    fast = replay_phases(StaticPolicy(steps), drawn, TABLE)
    slow = replay_phases(Dynamic(steps), drawn, TABLE)
    for name in ("steps", "tokens", "ms", "batch_size", "group", "request_tpot_ms"):
        assert (getattr(fast, name) == getattr(slow, name)).all()


def test_the_same_seed_gives_the_same_run_and_another_one_does_not():
    runs = [
        replay_phases(AdaptiveSpeculativeParams(3), draw_phases(PHASES, seed), TABLE)
        for seed in (1, 1, 2)
    ]
    assert (runs[0].tokens == runs[1].tokens).all()
    assert (runs[0].tokens != runs[2].tokens).any()


def test_requests_of_a_phase_fill_its_lanes():
    drawn = draw_phases(PHASES, seed=1)
    for each in drawn:
        assert (
            each.depths.shape
            == each.starts.shape
            == (
                each.phase.num_rounds,
                each.phase.batch_size,
            )
        )
        assert each.starts[0].all()
    lives = draw_phases([Phase(64, 4000, geometric(0.5), request_rounds=20)], 1)[0]
    # 12,800 requests: the mean life of 20 rounds has a standard error of 0.18.
    assert lives.starts.size / lives.starts.sum() == pytest.approx(20, abs=1)


def test_time_per_token_of_requests_is_their_time_over_their_tokens():
    drawn = draw_phases([Phase(2, 50, geometric(0.6), request_rounds=10)], 3)
    run = replay_phases(AdaptiveSpeculativeParams(3), drawn, TABLE)
    expected = []
    for lane in range(2):
        begins = [*np.flatnonzero(drawn[0].starts[:, lane]), 50]
        for begin, end in zip(begins, begins[1:], strict=False):
            accepted = np.minimum(drawn[0].depths[begin:end, lane], run.steps[begin:end])
            expected.append(run.ms[begin:end].sum() / (accepted + 1).sum())
    assert run.request_tpot_ms == pytest.approx(expected)


def test_throughput_of_fixed_steps_is_the_expected_one():
    """40,000 rounds: 5 standard errors of the mean tokens are below 3 %."""
    phase = Phase(4, 10_000, drifting(0.9, 0.5, 4))
    for steps in (0, 2, 6):
        run = replay_phases(StaticPolicy(steps), draw_phases([phase], 5), TABLE)
        rate = phase.expected_tokens()[steps] / TABLE.cost(4, steps)
        assert run.tokens_per_s == pytest.approx(1000 * rate, rel=0.03)


def test_the_oracle_has_the_best_expected_steps_and_loses_nothing_to_itself():
    drawn = draw_phases(PHASES, seed=1)
    oracle = replay_oracle(drawn, TABLE)
    for index, phase in enumerate(PHASES):
        assert set(oracle.steps[oracle.group == index]) == {best_steps(phase, TABLE)}
        rates = [phase.expected_tokens()[s] / TABLE.cost(phase.batch_size, s) for s in TABLE.steps]
        assert best_steps(phase, TABLE) == np.argmax(rates)
    assert share_of_oracle(oracle, oracle) == pytest.approx(1.0)
    assert group_shares(oracle, oracle) == pytest.approx(np.ones(4))
    assert regret(oracle, oracle)[-1] == pytest.approx(0.0, abs=1e-6)


def test_the_oracle_ignores_entries_without_a_time():
    table = CostTable({(1, 0): 4.0, (1, 3): 4.5, (4, 0): 4.0, (4, 7): 4.5})
    assert best_steps(Phase(1, 1, geometric(0.99)), table) == 3


def test_shares_are_the_time_for_equal_work():
    """Half speed in half of the work: 1.5 times the time, whatever the mix of rounds was."""
    table = CostTable({(1, 0): 1.0, (1, 1): 2.0, (2, 0): 1.0, (2, 1): 1.0})
    phases = [Phase(1, 100, geometric(0.0)), Phase(2, 50, geometric(0.0))]
    drawn = draw_phases(phases, 1)
    oracle = replay_oracle(drawn, table)
    result = judge("S=1", replay_phases(StaticPolicy(1), drawn, table), oracle, min_rounds=1)
    assert oracle.ms.sum() == 150
    assert result.share == pytest.approx(150 / 250)
    assert result.tokens_per_s == pytest.approx(oracle.tokens_per_s * 150 / 250)
    assert (result.worst_share, result.worst_group) == (0.5, "phase 0, B=1")


def test_phases_of_one_name_are_one_group():
    phases = [Phase(1, 10, geometric(0.5), name=name) for name in ("a", "b", "a")]
    run = replay_phases(StaticPolicy(1), draw_phases(phases, 1), TABLE)
    assert run.groups == ["a", "b"]
    assert np.bincount(run.group).tolist() == [20, 10]


def test_every_change_of_steps_is_a_switch():
    class Alternating:
        def __init__(self):
            self.round = 0

        def get_steps_for_batch(self, batch_size):
            self.round += 1
            return self.round % 2

        def on_verify_complete(self, counts, batch_size, executed_steps=None):
            pass

    drawn = draw_phases([Phase(1, 100, geometric(0.5))], 1)
    run = replay_phases(Alternating(), drawn, TABLE, switch_ms=2.0)
    assert run.num_switches == 99
    plain = sum(TABLE.cost(1, s) for s in run.steps.tolist())
    assert run.ms.sum() == pytest.approx(plain + 2.0 * 99)


def slow_trace(policy, trace, depths, table, most):
    """Continuous batching in the plainest words: one dict per request."""
    now, waiting, running, done, rounds = 0.0, list(range(len(trace))), [], {}, []
    while waiting or running:
        if not running:
            now = max(now, trace.arrival_ms[waiting[0]])
        while waiting and len(running) < most and trace.arrival_ms[waiting[0]] <= now:
            index = waiting.pop(0)
            running.append(
                {"index": index, "start": now, "round": 0, "left": trace.output_tokens[index]}
            )
        context = np.mean(
            [
                trace.prompt_tokens[r["index"]] + trace.output_tokens[r["index"]] - r["left"]
                for r in running
            ]
        )
        steps = policy.get_steps_for_batch(len(running))
        ms = table.cost(len(running), steps, context)
        counts, emitted = [], 0
        for r in running:
            accepted = min(depths[r["index"]][r["round"]], steps)
            counts.append(accepted)
            tokens = min(accepted + 1, r["left"])
            r["round"] += 1
            r["left"] -= tokens
            emitted += tokens
        policy.on_verify_complete(counts, len(running), steps)
        now += ms
        rounds.append((steps, len(running), emitted, ms))
        for r in running:
            if r["left"] == 0:
                done[r["index"]] = (now - r["start"]) / trace.output_tokens[r["index"]]
        running = [r for r in running if r["left"]]
    return rounds, [done[i] for i in range(len(trace))]


def test_continuous_batching_equals_a_plain_loop():
    table = CostTable.from_function(
        lambda b, s: 4.0 + 0.3 * s + 0.02 * b * (s + 1),
        [1, 4, 8],
        range(8),
        context_tokens=100,
        context_slopes={4: 0.5, 8: 1.0},
    )
    generator = np.random.Generator(np.random.PCG64(2))
    trace = constant(generator, 150, 40.0, mean_prompt=200, mean_output=30)
    process = Mixture([geometric(0.4), geometric(0.9)], [1, 1])
    flat = process.depths(np.random.Generator(np.random.PCG64(9)), trace.output_tokens)
    depths = [part.tolist() for part in np.split(flat, np.cumsum(trace.output_tokens)[:-1])]
    run = replay_trace(AdaptiveSpeculativeParams(3), trace, process, table, seed=9, max_batch=6)
    rounds, tpot = slow_trace(AdaptiveSpeculativeParams(3), trace, depths, table, 6)
    steps, batch, tokens, ms = zip(*rounds, strict=True)
    assert run.steps.tolist() == list(steps)
    assert run.batch_size.tolist() == list(batch)
    assert run.tokens.tolist() == list(tokens)
    assert run.ms.tolist() == pytest.approx(ms)
    assert run.request_tpot_ms == pytest.approx(tpot)
    assert run.tokens.sum() == trace.output_tokens.sum()
    assert {1, 6} <= set(batch), "the case must reach an idle and a full batch"


def test_the_oracle_of_a_trace_does_not_draft_beyond_an_output():
    trace = Trace([0.0, 500.0], [1, 1], [2, 2])
    run = replay_trace(TraceOracle(geometric(1.0), TABLE), trace, geometric(1.0), TABLE, seed=1)
    assert run.steps.tolist() == [1, 1]


def test_too_large_a_batch_and_a_missing_time_are_refused():
    drawn = draw_phases([Phase(65, 3, geometric(0.5))], 1)
    with pytest.raises(ValueError, match="at most 64, the largest of the cost table, got 65"):
        replay_phases(StaticPolicy(1), drawn, TABLE)
    drawn = draw_phases([Phase(4, 3, geometric(0.5))], 1)
    for policy in (StaticPolicy(9), Dynamic(9)):
        with pytest.raises(ValueError, match="no time for batch size 4, S 9"):
            replay_phases(policy, drawn, TABLE)
    trace = Trace([0.0], [1], [5])
    with pytest.raises(ValueError, match="no time for batch size 1, S 9"):
        replay_trace(StaticPolicy(9), trace, geometric(0.5), TABLE, seed=1)
    with pytest.raises(ValueError, match="`lag`"):
        replay_phases(StaticPolicy(1), drawn, TABLE, lag=0)


@pytest.mark.parametrize("field", ["batch_size", "num_rounds", "request_rounds"])
def test_bad_phases_are_refused(field):
    good = {"batch_size": 1, "num_rounds": 1, "process": geometric(0.5), "request_rounds": 1}
    with pytest.raises(ValueError, match=f"`{field}` of a phase must be at least 1, got 0"):
        Phase(**(good | {field: 0}))


def test_policies_are_made_afresh_and_only_with_steps_that_have_times():
    factories = policy_factories(TABLE)
    assert {"none", "S=1", "S=7", "ema", "ema+0"} <= factories.keys()
    assert factories["ema"]() is not factories["ema"]()
    assert 0 in factories["ema+0"]().candidate_steps
    few = policy_factories(CostTable({(1, 0): 1.0, (1, 1): 1.0}))
    assert {name for name in few if is_static(name)} == {"none", "S=1"}
    assert "ema" not in few
