"""Logits so large that 32 bits do not hold an element's offset."""

import adaptive_spec_ext
import pytest
import torch

pytestmark = pytest.mark.gpu

BATCH_SIZE, NUM_STEPS, VOCAB_SIZE = 4_100, 3, 1 << 18


@pytest.fixture(scope="module")
def batch():
    """Drafts, choices and logits of more than 2^32 elements: low everywhere, high at the choices.

    All choices differ, so an offset that wraps finds another row's.
    """
    device = torch.device("cuda")
    shape = (BATCH_SIZE, NUM_STEPS + 1, VOCAB_SIZE)
    assert BATCH_SIZE * (NUM_STEPS + 1) * VOCAB_SIZE > 1 << 32
    free, _ = torch.cuda.mem_get_info()
    needed = 2 * BATCH_SIZE * (NUM_STEPS + 1) * VOCAB_SIZE + (1 << 30)
    if free < needed:
        pytest.skip(f"needs {needed / 1e9:.0f} GB of GPU memory, {free / 1e9:.0f} GB are free")
    logits = torch.full(shape, -1.0, dtype=torch.bfloat16, device=device)
    generator = torch.Generator().manual_seed(1)
    choices = torch.randperm(VOCAB_SIZE, generator=generator)[: BATCH_SIZE * (NUM_STEPS + 1)]
    choices = choices.view(BATCH_SIZE, NUM_STEPS + 1)
    on_device = choices.to(device)
    for first in range(0, BATCH_SIZE, 512):
        rows = slice(first, first + 512)
        logits[rows].scatter_(2, on_device[rows, :, None], 1.0)
    drafts = choices[:, :-1].clone()
    # The first mismatch at every position, and rows without any.
    lengths = torch.arange(BATCH_SIZE) % (NUM_STEPS + 1)
    for step in range(NUM_STEPS):
        drafts[lengths == step, step] += 1
    yield drafts, choices, logits
    del logits
    torch.cuda.empty_cache()


def check(drafts, choices, logits):
    outputs = {}
    for device in (drafts.device, logits.device):
        outputs[device.type] = (
            torch.zeros(choices.shape, dtype=torch.int32, device=device),
            torch.zeros(len(choices), dtype=torch.int32, device=device),
        )
    adaptive_spec_ext.verify_chain_greedy(drafts, choices, *outputs["cpu"])
    adaptive_spec_ext.verify_chain_greedy_from_logits(
        drafts.to(logits.device), logits, *outputs[logits.device.type]
    )
    for own, expected in zip(outputs[logits.device.type], outputs["cpu"], strict=True):
        wrong = (own.cpu() != expected).view(len(choices), -1).any(1).nonzero().flatten().tolist()
        assert wrong == [], f"requests {wrong[:10]} differ"


def test_more_than_four_billion_logits(batch):
    check(*batch)


def test_rows_more_than_two_billion_elements_apart(batch):
    """Few rows, huge strides: a row number times an int stride would wrap."""
    drafts, choices, logits = (tensor[:: BATCH_SIZE // 2 - 1] for tensor in batch)
    assert logits.stride(0) > 1 << 31
    check(drafts, choices, logits)
