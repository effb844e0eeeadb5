"""The ops as torch sees them: schemas that declare every mutation, fake tensors, torch.compile."""

import adaptive_spec_ext
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from adaptive_spec.testing.op_cases import OpCall, sample_calls

SAMPLES = sample_calls()
samples = pytest.mark.parametrize("name", SAMPLES)


def overload(call: OpCall):
    return getattr(torch.ops.adaptive_spec, call.op).default


def split_arguments(call: OpCall) -> tuple[list, dict]:
    """Positional and keyword arguments as the schema wants them."""
    arguments = call.arguments()
    schema = overload(call)._schema
    positional = [
        arguments.pop(argument.name, argument.default_value)
        for argument in schema.arguments
        if not argument.kwarg_only
    ]
    return positional, arguments


@samples
def test_opcheck(name):
    call = SAMPLES[name].clone()
    positional, keywords = split_arguments(call)
    torch.library.opcheck(overload(call), tuple(positional), keywords)


@samples
def test_schema_declares_exactly_what_is_mutated(name):
    call = SAMPLES[name]
    declared = {a.name for a in overload(call)._schema.arguments if a.alias_info is not None}
    assert declared & set(call.tensors) == call.mutated


@samples
def test_compile_fullgraph_applies_the_mutation_once(name):
    torch._dynamo.reset()
    call = SAMPLES[name].clone()
    expected = call.clone()
    function = getattr(adaptive_spec_ext, call.op)
    expected.run(function)
    tensors, options = {n: t.view for n, t in call.tensors.items()}, call.options

    @torch.compile(fullgraph=True, backend="aot_eager")
    def compiled(tensors):
        function(**tensors, **options)

    compiled(tensors)
    call.assert_equal(expected)


def test_one_graph_serves_all_batch_sizes():
    """The Meta kernels read no sizes; reading one would tie the graph to it."""
    torch._dynamo.reset()
    graphs = []

    def backend(graph_module, example_inputs):
        graphs.append(graph_module)
        return graph_module.forward

    @torch.compile(fullgraph=True, backend=backend, dynamic=True)
    def verify(draft_tokens, target_predict, output_token_ids, accept_token_num):
        adaptive_spec_ext.verify_chain_greedy(
            draft_tokens, target_predict, output_token_ids, accept_token_num
        )

    for batch_size in (2, 3, 7, 16):
        drafts = torch.arange(batch_size * 3).view(batch_size, 3)
        count = torch.zeros(batch_size, dtype=torch.int32)
        target = torch.cat([drafts, drafts[:, :1]], 1)
        verify(drafts, target, torch.zeros(batch_size, 4, dtype=torch.int32), count)
        assert count.tolist() == [3] * batch_size
    assert len(graphs) == 1


@samples
def test_meta_and_fake_tensors_pass_through(name):
    call = SAMPLES[name].clone()
    function = getattr(adaptive_spec_ext, call.op)
    meta = {n: t.view.to("meta") for n, t in call.tensors.items()}
    function(**meta, **call.options)
    with FakeTensorMode() as mode:
        fake = {n: mode.from_tensor(t.view) for n, t in call.tensors.items()}
        function(**fake, **call.options)
    call.assert_equal(SAMPLES[name])
