"""The entry point `sglang.srt.plugins: tidekv`. SGLang calls `register` early in every process.

SGLang logs and swallows what a plugin raises and what a hook fails at, and then serves stock. So nothing here may end
in an exception that it catches: what is wrong ends the process, with the reason.
"""

from __future__ import annotations

import sys
from typing import NoReturn

from tidekv.errors import ConfigError
from tidekv.sglang_plugin import config, seams


def register() -> None:
    """Install the hooks if TIDEKV_SGLANG=1; otherwise do nothing at all."""
    try:
        if not config.is_switched_on():
            return
        install(config.read_settings())
    except ConfigError as error:
        _stop(error)


def install(settings: config.Settings) -> None:
    """Register every hook, apply them, and see that they took. `ConfigError` says what did not."""
    from sglang.version import __version__

    seams.check_version(__version__)
    try:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        from tidekv.sglang_plugin import backends, build, hooks
    except ImportError as error:
        raise ConfigError(f"SGLang {__version__} lacks something that tidekv builds on: {error}") from error
    build.begin(settings)
    wanted = hooks.hooks()
    for seam, hook in wanted.items():
        HookRegistry.register(seam.path, hook, HookType.AROUND)
    backends.register()
    HookRegistry.apply_hooks()
    missing = [seam.path for seam in wanted if not hooks.is_hooked(seam)]
    if missing:
        raise ConfigError(f"SGLang did not take the hooks on {', '.join(missing)}; its log says why")


def _stop(error: ConfigError) -> NoReturn:
    print(f"tidekv: {error}", file=sys.stderr, flush=True)
    raise SystemExit(1)  # SGLang catches Exception, which this is not
