"""The decoder and the draft: numbers as `transformers` gives them, caches that change nothing."""

import json

import pytest
import torch

from adaptive_spec.engine.draft import EagleDraft
from adaptive_spec.engine.kv_cache import KVCache
from adaptive_spec.engine.llama import LlamaConfig, LlamaForCausalLM
from adaptive_spec.engine.loading import (
    load_draft,
    load_llama,
    load_pair,
    random_pair,
    read_eos_token_ids,
    save_draft,
    save_llama,
)

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# (config class, what differs from the plain one)
ARCHITECTURES = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama-tied-mha": ("LlamaConfig", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "llama-mqa-biases": (
        "LlamaConfig",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    ),
    "llama-head-dim": ("LlamaConfig", {"head_dim": 12, "rms_norm_eps": 1e-3}),
    "llama-rope-llama3": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 5000.0, **LLAMA3_SCALING}},
    ),
    "llama-rope-linear": (
        "LlamaConfig",
        {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}},
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 16, "tie_word_embeddings": False}),
}


def save_reference(directory, name, **save_options):
    """A random model of `transformers`, saved; every parameter is random, norms and biases too."""
    kind, changes = ARCHITECTURES[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**(SIZES | changes))
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.uniform_(0.5, 1.5)
            elif parameter_name.endswith("bias"):
                parameter.normal_(0.0, 0.5)
            else:
                parameter.normal_(0.0, 1.5 * parameter.size(-1) ** -0.5)
    model.save_pretrained(directory, **save_options)
    return model


def tokens(*shape, vocab=97, seed=1):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


def positions_of(ids):
    return torch.arange(ids.size(1)).expand_as(ids)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_equal_those_of_transformers(name, tmp_path):
    reference = save_reference(tmp_path, name)
    model = load_llama(tmp_path)
    ids = tokens(3, 100)
    with torch.no_grad():
        expected = reference(ids).logits
        got = model.logits(model(ids, positions_of(ids)))
        cache = model.make_cache(4, 128)
        cached = model.logits(model(ids, positions_of(ids), cache, 100))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cached, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama-rope-llama3", "llama-rope-linear", "qwen3"])
def test_the_option_under_test_changes_the_logits(name, tmp_path):
    """Guards the comparison above against an option that both sides ignore."""
    save_reference(tmp_path, name)
    model = load_llama(tmp_path)
    ids = tokens(1, 100)
    with torch.no_grad():
        before = model.logits(model(ids, positions_of(ids)))
        raw = json.loads((tmp_path / "config.json").read_text())
        if name == "qwen3":
            raw["rms_norm_eps"] = 1.0
        else:
            raw["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        after_model = load_llama(tmp_path)
        after = after_model.logits(after_model(ids, positions_of(ids)))
    assert (before - after).abs().max() > 1e-2


def test_sharded_weights_and_rope_scaling_as_older_versions_write_it(tmp_path):
    reference = save_reference(tmp_path, "llama-rope-llama3", max_shard_size="40KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    raw = json.loads((tmp_path / "config.json").read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = rope
    (tmp_path / "config.json").write_text(json.dumps(raw))
    model = load_llama(tmp_path)
    ids = tokens(2, 50)
    with torch.no_grad():
        torch.testing.assert_close(
            model.logits(model(ids, positions_of(ids))),
            reference(ids).logits,
            rtol=1e-4,
            atol=1e-4,
        )


def test_what_is_saved_is_read_by_us_and_by_transformers(tmp_path):
    pair = random_pair(3)
    save_llama(pair.target, tmp_path / "target", dtype=torch.float32, eos_token_id=5)
    save_draft(pair.draft, tmp_path / "draft", dtype=torch.float32)
    target = load_llama(tmp_path / "target")
    draft = load_draft(tmp_path / "draft", target)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    ids = tokens(2, 30, vocab=64)
    with torch.no_grad():
        hidden = pair.target(ids, positions_of(ids))
        assert torch.equal(target(ids, positions_of(ids)), hidden)
        assert torch.equal(
            draft(ids, hidden, positions_of(ids)), pair.draft(ids, hidden, positions_of(ids))
        )
        torch.testing.assert_close(theirs(ids).logits, target.logits(hidden), rtol=1e-4, atol=1e-4)
    assert read_eos_token_ids(tmp_path / "target") == (5,)


# --- Caches -------------------------------------------------------------------------------------


class Sequence:
    """Runs a model over one batch in pieces; for a draft, with given hidden states."""

    def __init__(self, kind):
        pair = random_pair(11, dtype=torch.float64)
        generator = torch.Generator().manual_seed(2)
        self.ids = tokens(3, 40, vocab=64)
        self.hidden = torch.randn(3, 40, 32, dtype=torch.float64, generator=generator)
        self.model = pair.target if kind == "target" else pair.draft
        self.is_draft = kind == "draft"

    def run(self, ids, start, stop, cache=None, kv_len=None, rows=slice(None)):
        positions = torch.arange(start, stop).expand(ids.size(0), stop - start)
        inputs = [ids[:, start:stop]]
        if self.is_draft:
            inputs.append(self.hidden[rows, start:stop])
        with torch.no_grad():
            return self.model(*inputs, positions, cache, kv_len)

    def full(self):
        return self.run(self.ids, 0, 40)


@pytest.fixture(params=["target", "draft"])
def sequence(request):
    return Sequence(request.param)


@pytest.mark.parametrize("seed", range(4))
def test_pieces_with_a_cache_equal_the_whole(sequence, seed):
    """Random cuts; the bound on the keys is exact, loose or absent."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(39, generator=generator)[:6].add(1).sort().values.tolist()
    cache, outputs = sequence.model.make_cache(5, 48), []
    for index, (start, stop) in enumerate(zip([0, *cuts], [*cuts, 40], strict=True)):
        kv_len = (stop, min(stop + 5, 48), None)[index % 3]
        outputs.append(sequence.run(sequence.ids, start, stop, cache, kv_len))
    torch.testing.assert_close(torch.cat(outputs, 1), sequence.full(), rtol=1e-10, atol=1e-12)


def test_rejected_tokens_leave_no_trace(sequence):
    """Wrong tokens at later positions, then the right ones: as if the wrong had not been there."""
    cache, outputs, at = sequence.model.make_cache(3, 48), [], 0
    wrong = (sequence.ids + 7) % 64
    while at < 40:
        mixed = sequence.ids.clone()
        mixed[:, at + 2 :] = wrong[:, at + 2 :]
        got = sequence.run(mixed, at, min(at + 8, 40), cache, 48)
        # The first two tokens were right, the rest is drafted anew.
        outputs.append(got[:, :2])
        at += 2
    torch.testing.assert_close(torch.cat(outputs, 1), sequence.full(), rtol=1e-10, atol=1e-12)


def test_rows_at_different_positions_in_one_batch(sequence):
    cache = sequence.model.make_cache(3, 48)
    lengths = [5, 17, 30]
    for row, length in enumerate(lengths):
        rows = slice(row, row + 1)
        sequence.run(sequence.ids[rows], 0, length, cache.rows(row, row + 1), length, rows)
    positions = torch.tensor(lengths)[:, None] + torch.arange(4)
    inputs = [sequence.ids.gather(1, positions)]
    if sequence.is_draft:
        inputs.append(torch.stack([sequence.hidden[r, p] for r, p in enumerate(positions)]))
    with torch.no_grad():
        got = sequence.model(*inputs, positions, cache, 34)
    full = sequence.full()
    expected = torch.stack([full[row, p] for row, p in enumerate(positions)])
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


def test_what_may_not_be_read_does_not_matter(sequence):
    """Other rows and keys from kv_len on hold NaN; stale keys after a position are huge."""
    clean, dirty = (sequence.model.make_cache(6, 48) for _ in range(2))
    for cache in (clean, dirty):
        sequence.run(sequence.ids, 0, 10, cache, 10)
    dirty.data[:, 3:] = float("nan")
    dirty.data[:, :, 20:] = float("nan")
    dirty.data[:, :3, 12:20] = 1e30
    expected = sequence.run(sequence.ids, 10, 12, clean, 12)
    got = sequence.run(sequence.ids, 10, 12, dirty, 20)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    # Nothing but the twelve positions of the three rows was written.
    assert dirty.data[:, 3:].isnan().all()
    assert (dirty.data[:, :3, 12:20] == 1e30).all()


def test_a_row_that_overflowed_is_safe_after_clearing(sequence):
    cache = sequence.model.make_cache(2, 48)
    cache.data[:, 1] = float("nan")
    cache.clear_row(1)
    rows = slice(0, 1)
    got = sequence.run(sequence.ids[rows], 0, 40, cache.rows(1, 2), 48, rows)
    torch.testing.assert_close(got, sequence.full()[rows], rtol=1e-10, atol=1e-12)


def test_clearing_a_part_of_a_row_leaves_the_rest_alone():
    cache = KVCache(2, 3, 8, 2, 4)
    cache.data.fill_(1.0)
    cache.clear_row(1, 5)
    assert not cache.data[:, 1, :5].any()
    assert cache.data.sum() == cache.data[:, 0].numel() * 3 - cache.data[:, 1, :5].numel()


def test_a_copied_row_continues_like_its_source(sequence):
    cache = sequence.model.make_cache(4, 48)
    sequence.run(sequence.ids, 0, 20, cache, 20)
    cache.copy_row(2, 0, 20)
    rows = slice(2, 3)
    got = sequence.run(sequence.ids[rows], 20, 40, cache.rows(0, 1), 40, rows)
    torch.testing.assert_close(got, sequence.full()[rows, 20:], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes_stay_close_to_float64(dtype):
    exact, low = random_pair(4, dtype=torch.float64), random_pair(4, dtype=dtype)
    ids = tokens(2, 20, vocab=64)
    with torch.no_grad():
        expected = exact.target(ids, positions_of(ids))
        got = low.target(ids, positions_of(ids), low.target.make_cache(2, 20), 20)
    assert got.dtype == dtype
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_positions_beyond_the_cache_raise_and_do_not_reach_the_next_row():
    pair = random_pair(0)
    cache = pair.target.make_cache(2, 8)
    ids = tokens(1, 1, vocab=64)
    with torch.no_grad(), pytest.raises(IndexError):
        pair.target(ids, torch.tensor([[8]]), cache, 8)
    assert not cache.data.any()


def test_a_cache_longer_than_the_config_promises_rotates_on():
    """Positions past max_position_embeddings are legal as long as the cache holds them."""
    pair = random_pair(0, max_position_embeddings=16, dtype=torch.float64)
    ids = tokens(1, 40, vocab=64)
    with torch.no_grad():
        cached = pair.target(ids, positions_of(ids), pair.target.make_cache(1, 40))
        torch.testing.assert_close(cached, pair.target(ids, positions_of(ids)))


# --- Errors -------------------------------------------------------------------------------------


def good_call():
    pair = random_pair(0)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    return pair.target, {
        "input_ids": ids,
        "positions": positions_of(ids),
        "cache": pair.target.make_cache(2, 8),
        "kv_len": 8,
    }


@pytest.mark.parametrize(
    ("change", "error", "named"),
    [
        ({"input_ids": torch.zeros(2, 3, dtype=torch.int32)}, TypeError, "input_ids"),
        ({"input_ids": torch.zeros(3, dtype=torch.int64)}, ValueError, "input_ids"),
        ({"positions": torch.zeros(2, 2, dtype=torch.int64)}, ValueError, "positions"),
        ({"positions": torch.zeros(2, 3)}, TypeError, "positions"),
        ({"kv_len": 0}, ValueError, "kv_len"),
        ({"kv_len": 9}, ValueError, "kv_len"),
        ({"cache": KVCache(2, 1, 8, 2, 8)}, ValueError, "cache"),
        ({"cache": KVCache(2, 2, 8, 2, 8, torch.float64)}, TypeError, "cache"),
        ({"cache": KVCache(1, 2, 8, 2, 8)}, ValueError, "cache"),
        ({"cache": KVCache(2, 2, 8, 4, 8)}, ValueError, "cache"),
    ],
)
def test_bad_arguments_are_named(change, error, named):
    model, arguments = good_call()
    with torch.no_grad():
        model(**arguments)
        with pytest.raises(error, match=f"^{named}: expected"):
            model(**(arguments | change))
    if "cache" in change:
        assert not change["cache"].data.any()


def test_draft_checks_its_hidden_states_and_its_target():
    pair = random_pair(0)
    ids = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="^hidden: expected"):
        pair.draft(ids, torch.zeros(2, 3, 31), positions_of(ids))
    with pytest.raises(TypeError, match="^hidden: expected"):
        pair.draft(ids, torch.zeros(2, 3, 32, dtype=torch.float64), positions_of(ids))
    with pytest.raises(ValueError, match="^num_hidden_layers: expected 1"):
        EagleDraft(pair.target.config, pair.target)


@pytest.mark.parametrize(
    ("row", "call"),
    [
        ("rows", lambda c: c.rows(2, 2)),
        ("rows", lambda c: c.rows(0, 4)),
        ("src", lambda c: c.copy_row(3, 0, 1)),
        ("dst", lambda c: c.copy_row(0, -1, 1)),
        ("length", lambda c: c.copy_row(0, 1, 9)),
        ("row", lambda c: c.clear_row(3)),
        ("length", lambda c: c.clear_row(0, 9)),
        ("max_len", lambda c: KVCache(1, 1, 0, 1, 1)),
    ],
)
def test_cache_arguments_are_named(row, call):
    with pytest.raises(ValueError, match=f"^{row}: expected"):
        call(KVCache(2, 3, 8, 2, 4))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "gpt2"}, "model_type"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type.*'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"hidden_size": "48"}, "hidden_size"),
        ({"sliding_window": 64, "model_type": "mistral"}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_hidden_layers": 4}, "model.layers.3"),
        ({"num_hidden_layers": 2}, "model.layers.2"),
        ({"intermediate_size": 81}, "gate_up"),
        ({"attention_bias": True}, "q_proj.bias"),
    ],
)
def test_a_config_that_cannot_be_run_says_what_and_where(change, message, tmp_path):
    save_reference(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=message) as caught:
        load_llama(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "config.json").unlink(), "no such file.*config.json"),
        (lambda d: (d / "config.json").write_text("{"), "not valid JSON"),
        (lambda d: (d / "config.json").write_text("[]"), "expected a JSON object"),
        (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x01"), "not a safetensors file"),
    ],
)
def test_missing_or_damaged_files_say_what_and_where(damage, message, tmp_path):
    save_llama(random_pair(0).target, tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message) as caught:
        load_llama(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_draft_for_another_target_or_of_another_type_is_refused(tmp_path):
    save_draft(random_pair(0).draft, tmp_path / "draft")
    with pytest.raises(ValueError, match="hidden_size: expected 64"):
        load_draft(tmp_path / "draft", random_pair(0, hidden_size=64).target)
    save_llama(random_pair(0).target, tmp_path / "target")
    with pytest.raises(ValueError, match="expected model_type 'adaptive_spec_eagle'"):
        load_draft(tmp_path / "target", random_pair(0).target)


def test_a_pair_without_its_tokenizer_is_refused(tmp_path):
    pair = random_pair(0)
    save_llama(pair.target, tmp_path / "target")
    save_draft(pair.draft, tmp_path / "draft")
    with pytest.raises(ValueError, match="tokenizer: no such file"):
        load_pair(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer.json"):
        load_pair(tmp_path)


def test_config_checks_its_numbers():
    sizes = {
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 4,
    }
    LlamaForCausalLM(LlamaConfig(**sizes))
    for name in sizes:
        with pytest.raises(ValueError, match=f"^{name}: expected an integer >= 1, got 0"):
            LlamaConfig(**(sizes | {name: 0}))
