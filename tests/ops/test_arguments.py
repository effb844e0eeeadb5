"""Wrong arguments: a ValueError that says which, what was expected and what came, and nothing has
been written."""

import re

import adaptive_spec_ext
import pytest
import torch

from adaptive_spec.testing.op_cases import OpCall, sample_calls

SAMPLES = {name: call for name, call in sample_calls().items() if name.endswith(", full")}
ARGUMENTS = [(name, argument) for name, call in SAMPLES.items() for argument in call.tensors]
each_tensor = pytest.mark.parametrize(("name", "argument"), ARGUMENTS)

# Sizes in these arguments define B, D, S or V, so a different size is an error of another argument,
# or none.
DEFINES_ROWS = {
    "verify_tree_greedy": "candidates",
    "verify_chain_greedy": "draft_tokens",
    "verify_chain_greedy_from_logits": "draft_tokens",
    "build_chain_tree": "retrive_index",
    "tree_speculative_sampling_target_only": "candidates",
    "verify_chain_sampling": "draft_token_ids",
    "verify_chain_sampling_from_logits": "draft_tokens",
    "verify_tree_sampling_from_logits": "candidates",
}


def may_be_longer(call: OpCall, argument: str) -> bool:
    """Holds what is packed, so that only too short a one is an error."""
    if argument == "positions":
        return call.op == "build_chain_tree"
    return argument in ("predicts", "accepted_tokens")


def expect_error(call: OpCall, argument: str, *, names: str | None = None, **replaced) -> str:
    """Runs `call` with arguments replaced; returns the error's text."""
    before = call.clone()
    arguments = call.arguments() | replaced
    with pytest.raises(ValueError) as caught:
        getattr(adaptive_spec_ext, call.op)(**arguments)
    call.assert_equal(before)
    message = str(caught.value).splitlines()[0]
    pattern = rf"^{call.op}: argument `{names or argument}`: expected .+, got .+$"
    assert re.match(pattern, message), message
    return message


@each_tensor
def test_wrong_dtype(name, argument):
    call = SAMPLES[name].clone()
    tensor = call.tensors[argument].view
    wrong = torch.int32 if tensor.dtype == torch.int64 else torch.int64
    message = expect_error(call, argument, **{argument: tensor.to(wrong)})
    assert message.endswith(f"got {str(wrong).removeprefix('torch.')}")


@each_tensor
@pytest.mark.parametrize("dtype", [torch.bool, torch.complex64, torch.uint16])
def test_unusual_dtype(name, argument, dtype):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    if view.dtype != dtype:
        expect_error(call, argument, **{argument: torch.zeros(view.shape).to(dtype)})


@each_tensor
def test_wrong_device(name, argument):
    call = SAMPLES[name].clone()
    first = next(iter(torch.ops.adaptive_spec.__getattr__(call.op).default._schema.arguments)).name
    message = expect_error(
        call,
        argument,
        # Where the first argument is the odd one out, the one after it differs from it.
        names=r"\w+" if argument == first else argument,
        **{argument: call.tensors[argument].view.to("meta")},
    )
    assert "cpu" in message
    assert "meta" in message


@each_tensor
def test_wrong_rank(name, argument):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    message = expect_error(call, argument, **{argument: view.unsqueeze(0)})
    assert f"got {view.dim() + 1} (shape" in message
    expect_error(call, argument, **{argument: view[0]})


@each_tensor
def test_too_many_or_too_few_rows(name, argument):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    fewer = view.new_zeros(view.size(0) - 1, *view.shape[1:])
    more = view.new_zeros(view.size(0) + 1, *view.shape[1:])
    if argument == DEFINES_ROWS[call.op]:
        expect_error(call, argument, names=r"\w+", **{argument: fewer})
        expect_error(call, argument, names=r"\w+", **{argument: more})
    elif may_be_longer(call, argument):
        needed = view.size(0) - 2
        expect_error(call, argument, **{argument: view[: needed - 1]})
    else:
        message = expect_error(call, argument, **{argument: more})
        assert f"got [{view.size(0) + 1}" in message
        expect_error(call, argument, **{argument: fewer})


@pytest.mark.parametrize(
    ("name", "argument", "width"),
    [
        ("tree, full", "retrive_index", 7),
        ("tree, full", "retrive_next_token", 9),
        ("tree, full", "retrive_next_sibling", 1),
        ("tree, full", "target_predict", 9),
        ("chain, full", "target_predict", 3),
        ("chain, full", "output_token_ids", 3),
        ("logits, full", "target_logits", 3),
        ("logits, full", "output_token_ids", 3),
        ("chain tree, full", "retrive_next_sibling", 7),
        ("chain tree, full", "retrive_next_token", 9),
        ("sampled logits, full", "target_logits", 3),
        ("sampled logits, full", "draft_probs", 2),
        ("sampled logits, full", "output_token_ids", 3),
        ("sampled logits tree, full", "target_logits", 7),
        ("sampled logits tree, full", "positions", 9),
    ],
)
def test_wrong_width(name, argument, width):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    shape = (view.size(0), width, *view.shape[2:])
    message = expect_error(call, argument, **{argument: view.new_zeros(shape)})
    assert message.endswith(f"got {list(shape)}")


@pytest.mark.parametrize(
    ("name", "argument", "shape"),
    [
        ("tree, full", "candidates", (4, 0)),
        ("tree, full", "accept_index", (4, 0)),
        ("chain tree, full", "retrive_index", (4, 0)),
        ("logits, full", "target_logits", (4, 6, 0)),
        ("sampled logits, full", "target_logits", (4, 6, 0)),
        ("sampled logits tree, full", "target_logits", (4, 8, 0)),
    ],
)
def test_dimensions_that_must_not_be_empty(name, argument, shape):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    replaced = {argument: view.new_zeros(shape)}
    names = argument
    if argument == "accept_index":
        # No room for even S = 0.
        replaced["speculative_num_steps"] = 0
    expect_error(call, argument, names=names, **replaced)


@pytest.mark.parametrize("name", [n for n in SAMPLES if "chain tree" not in n])
@pytest.mark.parametrize("steps", [-1, 6, 2**40])
def test_steps_out_of_range(name, steps):
    expect_error(SAMPLES[name].clone(), "speculative_num_steps", speculative_num_steps=steps)


@pytest.mark.parametrize("name", [n for n in SAMPLES if "chain tree" not in n])
@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("seq_lens", "new_seq_lens"),
        ("new_seq_lens", "seq_lens"),
        ("state", "ring"),
        ("ring", "state"),
    ],
)
def test_arguments_that_go_together(name, given, missing):
    call = SAMPLES[name].clone()
    replaced = {missing: None}
    if given in ("state", "ring"):
        replaced[given] = torch.zeros(64, dtype=torch.int64)
    expect_error(call, missing, **replaced)


@pytest.mark.parametrize(
    ("name", "num_words"),
    [("logits, full", 32792), ("sampled logits, full", 32792), ("chain, full", 28)],
)
def test_workspace_must_be_a_large_enough_block(name, num_words):
    """Too small a one would be written past its end on a GPU."""
    call = SAMPLES[name].clone()
    if "logits" in name:
        assert num_words == adaptive_spec_ext.verify_workspace(4, 4).numel()
    for wrong in (
        torch.zeros(num_words - 1, dtype=torch.int64),
        torch.zeros(num_words, dtype=torch.int32),
        torch.zeros(2 * num_words, dtype=torch.int64)[::2],
        torch.zeros(num_words, 1, dtype=torch.int64),
        torch.zeros(num_words, dtype=torch.int64, device="meta"),
    ):
        expect_error(call, "workspace", workspace=wrong)
    call.run(getattr(adaptive_spec_ext, call.op), workspace=torch.zeros(num_words).long())


def test_workspace_sizes_must_not_be_negative():
    for sizes in ((-1, 4), (4, -1)):
        with pytest.raises(ValueError, match="verify_workspace: argument `.+`: expected 0 to"):
            adaptive_spec_ext.verify_workspace(*sizes)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("logits, full", "target_logits"),
        ("sampled logits, full", "target_logits"),
        ("sampled logits, full", "draft_probs"),
        ("sampled logits tree, full", "target_logits"),
    ],
)
def test_rows_must_be_contiguous_along_the_vocabulary(name, argument):
    call = SAMPLES[name].clone()
    view = call.tensors[argument].view
    rows = view.transpose(1, 2).contiguous().transpose(1, 2)
    assert "stride" in expect_error(call, argument, **{argument: rows})


def test_draft_probs_must_be_of_the_targets_vocabulary():
    call = SAMPLES["sampled logits, full"].clone()
    for size in (4, 6):
        rows = torch.zeros(4, 5, size)
        assert f"{size}]" in expect_error(call, "draft_probs", draft_probs=rows)


@pytest.mark.parametrize("name", ["sampled logits, full", "sampled logits tree, full"])
@pytest.mark.parametrize("stream", [-1, 2**24 + 1, 2**62])
def test_noise_streams_out_of_range(name, stream):
    """They would share noise with others: a stream takes part in 32 bits of the counter."""
    expect_error(SAMPLES[name].clone(), "noise_stream", noise_stream=stream)


def test_not_a_tensor_names_the_argument():
    call = SAMPLES["chain, full"].clone()
    for argument in call.tensors:
        with pytest.raises((RuntimeError, TypeError, ValueError), match=argument):
            adaptive_spec_ext.verify_chain_greedy(**(call.arguments() | {argument: [1, 2]}))


def test_unknown_keyword():
    call = SAMPLES["chain, full"].clone()
    with pytest.raises((RuntimeError, TypeError), match="num_req_s"):
        adaptive_spec_ext.verify_chain_greedy(**call.arguments(), num_req_s=None)
