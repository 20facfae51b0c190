"""SmolLM2-135M as a folder that SGLang 0.5.17 to 0.5.23 reads: the converted model with two spellings changed.

Made once, beside the converted model in the user's cache folder; the weights are a hard link, so it costs no disk.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from tidekv.config import cache_dir

FILES = ("chat_template.jinja", "generation_config.json", "model.safetensors", "tokenizer.json")


def model_folder() -> Path:
    """The folder to give to `--model-path`; `FileNotFoundError` says how to convert the model if it is not there."""
    source, target = cache_dir() / "smollm2-135m-instruct", cache_dir() / "smollm2-135m-sglang"
    if target.is_dir():
        return target
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is missing: run `make sglang-model`, which converts the packaged weights")
    work = Path(tempfile.mkdtemp(prefix=target.name + ".tmp-", dir=target.parent))
    try:
        for name in FILES:
            try:
                os.link(source / name, work / name)
            except OSError:  # another file system
                shutil.copyfile(source / name, work / name)
        config = json.loads((source / "config.json").read_text(encoding="utf-8"))
        config["rope_theta"] = config["rope_parameters"]["rope_theta"]  # where loaders before transformers 5 look
        (work / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
        tokenizer = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
        tokenizer["tokenizer_class"] = "PreTrainedTokenizerFast"  # a name that transformers 5.12 knows, too
        tokenizer.pop("backend", None)
        (work / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2), encoding="utf-8")
        work.chmod(0o755)
        os.rename(work, target)  # a folder that exists is complete
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


if __name__ == "__main__":
    print(model_folder())
