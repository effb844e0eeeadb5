"""A pair small enough to run the commands in seconds, written to disk as a user would have it."""

import json

import pytest
import torch
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers
from typer.testing import CliRunner

from adaptive_spec.cli import main
from adaptive_spec.engine.loading import save_draft, save_llama
from adaptive_spec.testing.models import agreeing_pair

PROMPTS = {
    "code": ["def add(a, b):\n    return", "import os\n", "for i in range(10):", "x = [1, 2]"],
    "prose": ["The module returns", "A list of", "See also the", "When it is called, the"],
    "sources": {"code": ["made up"], "prose": ["made up"]},
}


@pytest.fixture(scope="session")
def pair_dir(tmp_path_factory):
    """A random pair over bytes, with prompts; its draft is right some of the time."""
    directory = tmp_path_factory.mktemp("pair")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {c: i + 1 for i, c in enumerate(alphabet)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    pair = agreeing_pair(0.3, vocab_size=len(vocabulary), dtype=torch.float32)
    save_llama(pair.target, directory / "target", torch.float32, eos_token_id=0)
    save_draft(pair.draft, directory / "draft", torch.float32)
    (directory / "prompts.json").write_text(json.dumps(PROMPTS), encoding="utf-8")
    return directory


@pytest.fixture
def run():
    """Run `adaptive-spec` in this process; the result has exit_code, stdout and stderr."""

    def invoke(*arguments, **options):
        return CliRunner().invoke(main, [str(a) for a in arguments], **options)

    return invoke
