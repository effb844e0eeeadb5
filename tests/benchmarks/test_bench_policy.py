"""The policy benchmark: its cost tables are whole and differ, and it finds recovery."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from adaptive_spec import CostTable
from adaptive_spec.sim.acceptance import geometric
from adaptive_spec.sim.simulate import Phase, best_steps

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLES = sorted((BENCHMARKS / "cost_tables").glob("*.json"))


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_policy", BENCHMARKS / "bench_policy.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_tables_are_complete(path):
    table = CostTable.load(path)
    table.check_complete([1, 2, 4, 8, 16, 32, 64, 128], range(11))
    assert table.context_slopes.keys() == set(table.batch_sizes)
    assert path.stem.startswith(table.machine.lower())


def test_tables_differ_in_what_is_best():
    assert len(TABLES) >= 8
    tables = [CostTable.load(path) for path in TABLES]
    for batch, rate in ((1, 0.7), (128, 0.7)):
        best = {best_steps(Phase(batch, 1, geometric(rate)), table) for table in tables}
        assert len(best) >= 3


def test_recovery_is_where_the_next_rounds_are_good_together(bench):
    table = CostTable.from_function(lambda b, s: 4.0 + 0.5 * s, [1], range(8))
    phase = Phase(1, 100, geometric(0.9))
    best = best_steps(phase, table)
    assert bench.rounds_to_recover(np.full(100, best), phase, table) == 0
    assert bench.rounds_to_recover(np.full(100, 0), phase, table) == 100
    # One of twenty rounds without drafts costs less than 3 %, so recovery is just before.
    late = bench.rounds_to_recover(np.repeat([0, best], [30, 70]), phase, table)
    assert 28 <= late <= 30


def test_mixed_traffic_is_as_described(bench):
    phases = bench.mixed_phases(11, count=300)
    assert {phase.batch_size for phase in phases} >= {1, 2}
    assert max(phase.batch_size for phase in phases) <= 128
    assert all(150 <= phase.num_rounds <= 3000 for phase in phases)


def test_distorted_costs_stay_within_the_error(bench):
    table = CostTable.load(TABLES[0])
    ratio = bench.distorted(table, 0.2, seed=1).times / table.times
    assert 0.8 <= ratio.min() < 0.85
    assert 1.15 < ratio.max() <= 1.2


@pytest.mark.parametrize("part", ["recovery", "costs"])
def test_a_part_gives_a_row_for_each_policy(bench, part):
    world = bench.World({"one": CostTable.load(TABLES[0])}, [1], lag=1, switch_ms=0.0)
    rows = bench.PARTS[part](world)
    assert {"ema", "ema+0"} <= {row["policy"] for row in rows}
