"""Which options go together. Knows options, no machine and no model."""

from math import inf

from quire.config import EngineOptions
from quire.cost.memory_plan import parse_swap_space
from quire.errors import ConfigError

_BY_PREFIX = ("lpm", "dfs-weight", "cache-aware")  # policies that ask the prefix index
_LONGEST_CALIBRATION = 600.0  # seconds


def check_policies(options: EngineOptions) -> None:
    """Raises ConfigError for options that have no meaning beside the others, and says what to change."""
    if options.policy in _BY_PREFIX and not options.enable_prefix_caching:
        raise ConfigError(
            f"policy {options.policy!r} orders requests by what the prefix cache has of them; do not turn off "
            "enable_prefix_caching, or choose another policy"
        )
    if options.wait_weight is not None:
        if options.policy != "cache-aware":
            raise ConfigError(f"wait_weight is of policy 'cache-aware'; policy {options.policy!r} does not use it")
        if not 0 <= options.wait_weight < inf:
            raise ConfigError(f"wait_weight must be at least 0 and finite, not {options.wait_weight}")
    if options.eviction != "lru" and (not options.enable_prefix_caching or options.prefix_index != "radix"):
        instead = "do not turn off enable_prefix_caching" if not options.enable_prefix_caching else "use the radix one"
        raise ConfigError(f"eviction {options.eviction!r} needs the radix prefix index; {instead}, or leave it at lru")
    _check_preemption(options)
    if options.calibration is not None and not 0 <= options.calibration <= _LONGEST_CALIBRATION:
        raise ConfigError(f"calibration must be 0 to {_LONGEST_CALIBRATION:.0f} seconds, not {options.calibration}")


def _check_preemption(options: EngineOptions) -> None:
    asked = options.swap_space is not None and parse_swap_space(options.swap_space) > 0
    if options.preemption == "recompute" and asked:
        raise ConfigError(
            f"swap_space={options.swap_space} is of no use with preemption 'recompute'; leave out one of them"
        )
