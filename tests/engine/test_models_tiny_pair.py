"""The shipped pair, its tokenizer, and the training code that made it."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from adaptive_spec.engine.loading import load_pair, random_pair

ROOT = Path(__file__).resolve().parents[2]
PAIR = ROOT / "adaptive_spec" / "tiny_pair"


@pytest.fixture(scope="module")
def pair():
    return load_pair(PAIR)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    return importlib.import_module


# --- Tokenizer ----------------------------------------------------------------------------------

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)


@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_any_text_survives_the_tokenizer(text):
    tokenizer = load_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(0 <= token < tokenizer.vocab_size for token in ids)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, 1023), max_size=40))
def test_streamed_text_is_the_text_of_all_tokens(ids):
    """Also for token sequences that are not UTF-8, which a model may well produce."""
    tokenizer = load_tokenizer()
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_character_of_several_tokens_is_streamed_when_it_is_whole():
    tokenizer = load_tokenizer()
    ids = tokenizer.encode("🙂")
    assert len(ids) > 1
    stream = tokenizer.stream()
    assert [stream.push(token) for token in ids] == [""] * (len(ids) - 1) + ["🙂"]
    assert stream.finish() == ""
    stream = tokenizer.stream()
    assert stream.push(ids[0]) == ""
    assert stream.finish() == "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(cache=[]):  # noqa: B006
    """One tokenizer for all examples of a property; hypothesis takes no fixtures of its own."""
    if not cache:
        cache.append(importlib.import_module("adaptive_spec.engine.tokenizer"))
        cache.append(cache[0].Tokenizer.from_file(PAIR / "tokenizer.json"))
    return cache[1]


# --- Shipped pair -------------------------------------------------------------------------------


def test_the_pair_fits_the_repository():
    files = [path for path in PAIR.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000


def test_prompts_are_complete():
    prompts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    for kind in ("code", "prose"):
        assert len(set(prompts[kind])) == len(prompts["sources"][kind]) == 64
        assert all(150 <= len(text.encode()) <= 400 for text in prompts[kind])


def greedy(pair, ids, count):
    """The target's continuation of ``ids``, recomputed from scratch for every token."""
    for _ in range(count):
        hidden = pair.target(ids, torch.arange(ids.size(1)).expand_as(ids))
        ids = torch.cat([ids, pair.target.logits(hidden[:, -1:]).argmax(-1)], dim=1)
    return ids


@torch.inference_mode()
def test_the_draft_guesses_the_target_at_every_step(pair):
    """Of drafts that follow a right one, at each of seven steps, well over chance (1 in 1024)."""
    prompts = json.loads((PAIR / "prompts.json").read_text(encoding="utf-8"))
    right, compared = [0] * 7, [0] * 7
    for text in prompts["code"][:4] + prompts["prose"][:4]:
        prompt = torch.tensor([pair.tokenizer.encode(text)[-96:]])
        ids = greedy(pair, prompt, 32)
        hidden = pair.target(ids, torch.arange(ids.size(1))[None])
        for at in range(prompt.size(1), prompt.size(1) + 24, 3):
            cache = pair.draft.make_cache(1, at + 8)
            given, positions = ids[:, 1 : at + 1], torch.arange(at)[None]
            state = pair.draft(given, hidden[:, :at], positions, cache, at)[:, -1:]
            for step in range(7):
                guess = pair.draft.logits(state).argmax(-1)
                compared[step] += 1
                if guess.item() != ids[0, at + 1 + step].item():
                    break
                right[step] += 1
                place = torch.tensor([[at + step]])
                state = pair.draft(guess, state, place, cache, at + step + 1)
    assert compared[0] == 64
    shares = [hit / tried for hit, tried in zip(right, compared, strict=True) if tried >= 5]
    assert len(shares) >= 3
    assert min(shares) > 0.25


# --- Training code ------------------------------------------------------------------------------


def test_training_unrolls_the_draft_as_it_runs_when_drafting(example):
    """Every step at every position equals drafting with a cache from the same past."""
    train = example("train_tiny_pair")
    pair = random_pair(1, dtype=torch.float64)
    ids = torch.randint(64, (2, 14), generator=torch.Generator().manual_seed(0))
    tokens = ids[:, 1:]
    with torch.no_grad():
        hidden = pair.target(ids, torch.arange(14).expand(2, 14))[:, :-1]
        steps = list(train.unrolled(pair.draft, tokens, hidden, 5))
        for start in range(13 - 4):
            cache = pair.draft.make_cache(2, 16)
            positions = torch.arange(start + 1).expand(2, -1)
            past = tokens[:, : start + 1], hidden[:, : start + 1]
            given = pair.draft(*past, positions, cache, start + 1)[:, -1:]
            for step in range(5):
                at = start + step
                if step:
                    place = torch.full((2, 1), at)
                    given = pair.draft(tokens[:, at : at + 1], given, place, cache, at + 1)
                expected = steps[step][:, at : at + 1]
                torch.testing.assert_close(given, expected, rtol=1e-10, atol=1e-12)


def test_the_orthogonalised_update_has_singular_values_near_one(example):
    train = example("train_tiny_pair")
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 24, 64), (2, 64, 24), (1, 32, 32)):
        update = train.orthogonalize(torch.randn(shape, generator=generator))
        values = torch.linalg.svdvals(update)
        assert values.min() > 0.3
        assert values.max() < 1.3


def test_windows_cover_an_epoch_once(example):
    train = example("train_tiny_pair")
    windows = train.Windows(torch.arange(100), seed=0)
    seen = windows.take(9, 10).flatten().tolist()
    # Nine windows of ten always fit whatever the offset, and none is drawn twice.
    assert len(set(seen)) == 90
    assert windows.epochs == pytest.approx(0.9)


def test_what_held_out_topics_say_is_not_in_the_others(example, monkeypatch):
    text = example("tiny_pair_text")
    chosen = {"pydoc topic if", "pydoc topic compound"}
    monkeypatch.setattr(text, "is_held_out", chosen.__contains__)
    documents = text.reference_topics()
    held_out = [d for d in documents if d.held_out]
    assert {d.source for d in held_out} == chosen
    paragraphs = {True: set(), False: set()}
    for document in documents:
        paragraphs[document.held_out] |= {p.strip() for p in document.text.split("\n\n")}
    assert len(paragraphs[True]) > 50
    assert not paragraphs[True] & paragraphs[False] - {""}


def test_prompts_come_from_as_many_sources_as_possible(example):
    evaluate = example("evaluate_tiny_pair")
    text = example("tiny_pair_text")
    lines = "".join(f"line number {i} of this text\n" for i in range(400))
    documents = [
        text.Document("code", f"file{n}.py", lines.replace("this", f"{n}"), True) for n in range(5)
    ]
    copied = evaluate.pieces(documents[0].text)[0]
    chosen = evaluate.choose_prompts(documents, copied)
    assert copied not in dict(chosen)
    assert len({prompt for prompt, _ in chosen}) == 64
    counts = [sum(source == d.source for _, source in chosen) for d in documents]
    assert max(counts) - min(counts) <= 1
    with pytest.raises(ValueError, match="^documents: expected"):
        evaluate.choose_prompts(documents[:1], "")
