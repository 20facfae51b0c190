"""The three kinds of failure that tidekv raises. Pressure is not one of them: a full pool is a result (`None` or
`False`)."""


class ConfigError(ValueError):
    """The caller's mistake: a value that cannot work. The message names the value, what would be valid and what to
    change."""


class DoubleFreeError(ConfigError):
    """A free of something that is not handed out: freed before, page 0, out of range, or never allocated. Nothing was
    changed."""


class CapacityError(ConfigError):
    """A request that can never fit, even alone. The message gives the number of tokens that would."""


class InvariantError(RuntimeError):
    """Our mistake: the books do not add up. Never caught inside tidekv."""
