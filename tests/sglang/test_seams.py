"""The places of SGLang that the plugin touches are what it was written against, in each supported version."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

import pytest
from signatures import read_signatures, stored

from tidekv.errors import ConfigError
from tidekv.sglang_plugin import seams


@pytest.mark.parametrize("version", seams.SUPPORTED)
def test_stored_signatures_fit(version: str) -> None:
    assert seams.differences(stored()[version]) == []


def test_installed_signatures_fit() -> None:
    if importlib.util.find_spec("sglang") is None or importlib.util.find_spec("sglang.version") is None:
        pytest.skip("SGLang is not installed")
    spec = importlib.util.find_spec("sglang.version")
    assert spec is not None
    assert spec.origin is not None
    version = importlib.metadata.version("sglang")
    seams.check_version(version)
    found = read_signatures(Path(spec.origin).parents[1])
    assert seams.differences(found) == []
    assert found == stored()[version]


def test_a_changed_seam_is_named() -> None:
    signatures = dict(stored()[seams.RUN_HERE])
    gone, changed = seams.SEAMS[0].path, seams.SEAMS[1].path
    fields = next(seam.path for seam in seams.SEAMS if seam.name == "FlashAttentionMetadata")
    signatures[gone] = None
    signatures[changed] = ("self", "tokens")
    signatures[fields] = ("swa_page_table", "cu_seqlens_q")
    first, second, third = seams.differences(signatures)
    assert first == f"{gone} is not there"
    assert second.startswith(f"{changed} takes (self, tokens)")
    assert third == f"{fields} has no page_table"


def test_another_version_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"SGLang 0\.5\.19 is not supported.*0\.5\.20"):
        seams.check_version("0.5.19")
