"""Every CUDA op against the CPU op, bit for bit: outputs, guards around them, state and ring."""

import dataclasses

import adaptive_spec_ext
import numpy as np
import pytest
import torch

from adaptive_spec import ops
from adaptive_spec.state import AdaptiveState
from adaptive_spec.testing.op_cases import (
    SENTINEL,
    CaseOptions,
    Guarded,
    OpCall,
    chain_call,
    chain_tree_call,
    logits_call,
    sample_calls,
    tree_call,
)
from tests.gpu.rounds import (
    CONFIG,
    VERIFY_OPS,
    assert_counters_at_zero,
    assert_same_state,
)

pytestmark = pytest.mark.gpu

SAMPLES = sample_calls()
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
with_workspace = pytest.mark.parametrize("give_workspace", [True, False], ids=["given", "own"])


def workspace_for(call: OpCall, device: torch.device) -> torch.Tensor:
    batch_size = call.tensors["accept_token_num"].view.shape[0]
    num_positions = 0
    if "target_logits" in call.tensors:
        num_positions = call.tensors["target_logits"].view.shape[1]
    return adaptive_spec_ext.verify_workspace(batch_size, num_positions, device=device)


def check(call: OpCall, device: torch.device, *, give_workspace: bool = True) -> None:
    function = getattr(adaptive_spec_ext, call.op)
    expected, actual, extra = call.clone(), call.to(device), {}
    expected.run(function)
    if give_workspace and call.op != "build_chain_tree":
        extra["workspace"] = workspace_for(call, device)
    actual.run(function, **extra)
    actual.assert_equal(expected)
    if extra:
        assert_counters_at_zero(extra["workspace"])


def random_case(rng: np.random.Generator, **replaced) -> CaseOptions:
    batch_size = int(rng.choice([0, 1, 2, 5, 15, 16, 17, 33, 64]))
    case = CaseOptions(
        batch_size=batch_size,
        num_steps=int(rng.integers(0, 13)),
        num_nodes=int(rng.integers(1, 65)),
        vocab_size=int(rng.integers(1, 5)),
        num_reqs=int(rng.integers(-1, batch_size + 3)) if rng.random() < 0.7 else None,
        max_accept=bool(rng.integers(2)),
        outputs=bool(rng.integers(2)),
        extra_width=int(rng.integers(0, 5)),
        strided=bool(rng.integers(2)),
        malformed=bool(rng.integers(2)),
    )
    return dataclasses.replace(case, **replaced)


def check_random(make, device, seed: int, count: int, **replaced) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        case = random_case(rng, **replaced)
        try:
            check(make(rng, case), device, give_workspace=bool(rng.integers(2)))
        except AssertionError as error:
            error.add_note(str(case))
            raise


@with_workspace
@pytest.mark.parametrize("name", SAMPLES)
def test_samples(device, name, give_workspace):
    check(SAMPLES[name], device, give_workspace=give_workspace)


@pytest.mark.parametrize("seed", range(4))
def test_random_trees(device, seed):
    check_random(tree_call, device, seed, 50)


@pytest.mark.parametrize("seed", range(2))
def test_small_malformed_trees(device, seed):
    """Cycles among siblings and from child to ancestor must end as they do on the CPU."""
    check_random(tree_call, device, seed, 50, malformed=True, vocab_size=2, num_nodes=4)


@pytest.mark.parametrize("seed", range(4))
def test_random_chains(device, seed):
    check_random(chain_call, device, seed, 50)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(2))
def test_random_logits(device, dtype, seed):
    check_random(lambda rng, case: logits_call(rng, case, dtype), device, seed, 50)


@pytest.mark.parametrize("seed", range(2))
def test_random_chain_trees(device, seed):
    check_random(chain_tree_call, device, seed, 50)


@pytest.mark.parametrize("make", [tree_call, chain_call], ids=["tree", "chain"])
@pytest.mark.parametrize("batch_size", [1, 31, 32, 33, 127, 1000, 1024, 1025, 4095, 4096])
def test_batch_sizes(device, make, batch_size):
    """Requests are spread over warps, blocks and strides of the grid; tokens packed across them."""
    rng = np.random.default_rng(batch_size)
    case = CaseOptions(batch_size, 3, num_nodes=6, num_reqs=batch_size - 1, malformed=True)
    check(make(rng, case), device, give_workspace=batch_size % 2 == 0)


@pytest.mark.parametrize(("batch_size", "num_steps"), [(4096, 1), (1025, 3), (300, 7), (5, 63)])
def test_logits_of_many_rows(device, batch_size, num_steps):
    rng = np.random.default_rng(batch_size)
    case = CaseOptions(
        batch_size, num_steps, vocab_size=111, num_reqs=batch_size, max_accept=True, malformed=True
    )
    check(logits_call(rng, case, torch.bfloat16), device)


@pytest.mark.parametrize("num_steps", [31, 32, 62, 63])
def test_many_nodes_and_steps(device, num_steps):
    """A warp holds 64 entries of a row in registers: up to there, at it and past it."""
    rng = np.random.default_rng(num_steps)
    for num_nodes in (64, 65, 100):
        case = CaseOptions(9, num_steps, num_nodes=num_nodes, malformed=True)
        check(tree_call(rng, case), device)
    check(chain_call(rng, CaseOptions(9, num_steps + 30)), device)
    check(logits_call(rng, CaseOptions(9, num_steps + 30, vocab_size=9), torch.float16), device)


VOCAB_SIZES = [111, 127, 128, 1_000, 4_097, 32_003, 50_257, 128_256, 151_936, 262_143, 262_144]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_vocab_sizes(device, vocab_size, dtype):
    """Rows with every kind of start and remainder around 16-byte lines, cut into 1 to many pieces.

    Few distinct values, so the maximum is shared by entries of all pieces and the lowest must win.
    """
    rng = np.random.default_rng(vocab_size)
    for batch_size, strided, malformed in ((1, False, False), (2, True, True), (3, False, True)):
        case = CaseOptions(
            batch_size, 2, vocab_size=vocab_size, strided=strided, malformed=malformed
        )
        check(logits_call(rng, case, dtype), device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [128, 128_000, 151_936])
def test_logits_that_are_contiguous_and_aligned(device, vocab_size, dtype):
    """What a language model's head writes: no element beside the row that a bad load would hit."""
    rng = np.random.default_rng(vocab_size)
    call = logits_call(rng, CaseOptions(3, 2, vocab_size=vocab_size, malformed=True), dtype)
    logits = call.tensors["target_logits"].view.contiguous()
    inside = torch.ones(logits.numel(), dtype=torch.bool)
    call.tensors["target_logits"] = Guarded(logits, logits.view(-1), inside)
    check(call, device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", ["first", "last", "middle"])
def test_a_lone_maximum_is_found_wherever_it_is(device, dtype, place):
    """Each thread, each piece and each remainder has to be looked at."""
    rng = np.random.default_rng(1)
    for vocab_size in (111, 4_099, 65_537):
        call = logits_call(rng, CaseOptions(2, 1, vocab_size=vocab_size), dtype)
        logits, drafts = call.tensors["target_logits"].view, call.tensors["draft_tokens"].view
        choices = {
            "first": torch.arange(4).view(2, 2),
            "last": vocab_size - 1 - torch.arange(4).view(2, 2),
            "middle": torch.from_numpy(rng.integers(0, vocab_size, (2, 2))),
        }[place]
        logits.scatter_(2, choices[..., None], 9.0)
        drafts.copy_(choices[:, :1])
        check(call, device)


@pytest.mark.parametrize("kind", VERIFY_OPS)
@pytest.mark.parametrize("batch_size", [7, 40], ids=["one block", "blocks"])
@with_workspace
def test_state_and_ring(device, kind, batch_size, give_workspace):
    """Rounds on one state and one workspace, of changing size, slot and S, more than a ring holds.

    EMA bits, counters, decisions and ring words must be those of the CPU.
    """
    rng = np.random.default_rng(batch_size)
    expected_state = AdaptiveState(CONFIG, 3, ring_depth=16)
    state = AdaptiveState(CONFIG, 3, device=device, ring_depth=16)
    workspace = adaptive_spec_ext.verify_workspace(batch_size, 8, device=device)
    extra = {"workspace": workspace} if give_workspace else {}
    steps_seen = set()
    for round_ in range(40):
        num_reqs = int(rng.integers(0, batch_size + 1))
        slot = expected_state.slot_for_batch(num_reqs)
        steps = expected_state.get_steps_for_batch(num_reqs)
        case = CaseOptions(
            batch_size, steps, num_nodes=10, num_reqs=num_reqs, max_accept=True, malformed=True
        )
        expected = VERIFY_OPS[kind](rng, case)
        if round_ // 8 % 2:
            expected.tensors["max_accept"].view.zero_()
        actual = expected.to(device)
        function = getattr(ops, expected.op)
        expected.run(function, state=expected_state, slot=slot)
        actual.run(function, state=state, slot=slot, **extra)
        actual.assert_equal(expected)
        torch.cuda.synchronize()
        assert state.ring.read(round_, slot) == expected_state.ring.read(round_, slot)
        assert state.ring.record(round_) == expected_state.ring.record(round_)
        steps_seen.add(steps)
    assert len(steps_seen) > 1, "the state never switched: it was hardly exercised"
    assert_same_state(state, expected_state)
    assert_counters_at_zero(workspace)


@pytest.mark.parametrize("batch_size", [0, 1, 33, 1_000, 4_096])
def test_update_and_select(device, batch_size):
    """Counts out of range included: they are anomalies and count as the nearest possible."""
    rng = np.random.default_rng(batch_size)
    expected, state = AdaptiveState(CONFIG, 3), AdaptiveState(CONFIG, 3, device=device)
    for _ in range(20):
        counts = torch.from_numpy(rng.integers(-2, 6, 2 * batch_size).astype(np.int32))[::2]
        num_reqs = torch.tensor([int(rng.integers(-1, batch_size + 3))], dtype=torch.int32)
        slot = int(rng.integers(3))
        options = {"slot": slot, "speculative_num_steps": int(rng.choice([1, 3]))}
        ops.update_and_select(counts, expected, num_reqs=num_reqs, **options)
        on_device = counts.to(device)
        ops.update_and_select(on_device, state, num_reqs=num_reqs.to(device), **options)
    assert_same_state(state, expected)


def test_a_state_that_is_none_is_left_alone(device):
    """The host cannot look into device memory, so the kernel must: no write through bad sizes."""
    state = AdaptiveState(CONFIG, 3, device=device)
    ring = state.ring.tensor
    counts = torch.zeros(2, dtype=torch.int32, device=device)
    garbage = torch.full((state.tensor.numel(),), SENTINEL, dtype=torch.int64, device=device)
    short = state.tensor[:-1].clone()
    for words in (garbage, short):
        before, ring_before = words.clone(), ring.add(0)
        adaptive_spec_ext.update_and_select(counts, words, ring, slot=0, speculative_num_steps=3)
        # Many blocks, whose sums would be added up in the state's header.
        drafts = torch.zeros(40, 3, dtype=torch.int64, device=device)
        adaptive_spec_ext.verify_chain_greedy(
            drafts,
            torch.zeros(40, 4, dtype=torch.int64, device=device),
            torch.zeros(40, 4, dtype=torch.int32, device=device),
            torch.zeros(40, dtype=torch.int32, device=device),
            state=words,
            ring=ring,
        )
        assert torch.equal(words, before)
        assert torch.equal(ring.add(0), ring_before)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name.endswith(", full")])
def test_arguments_on_another_device(device, name):
    """A host pointer in a kernel would be an illegal access, and the end of the process."""
    call = SAMPLES[name].to(device)
    before = call.to("cpu")
    arguments = call.arguments()
    arguments["num_reqs"] = arguments["num_reqs"].cpu()
    with pytest.raises(ValueError, match=rf"^{call.op}: argument `num_reqs`: expected .*cuda"):
        getattr(adaptive_spec_ext, call.op)(**arguments)
    call.assert_equal(before)


def test_float64_logits_are_refused(device):
    call = SAMPLES["logits, full"].to(device)
    before = call.to("cpu")
    arguments = call.arguments()
    arguments["target_logits"] = arguments["target_logits"].double()
    with pytest.raises(ValueError, match="argument `target_logits`: expected dtype"):
        adaptive_spec_ext.verify_chain_greedy_from_logits(**arguments)
    call.assert_equal(before)
