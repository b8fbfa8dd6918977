"""Seeds for requests that bring none. Knows numbers only; nothing is drawn."""

_WORD = 2**64 - 1


def nth_seed(seed: int, n: int) -> int:
    """That of the n-th request of an engine with this seed, 0 to 2^64 - 1; consecutive ones share nothing."""
    return _mix(_mix(seed) + n)


def _mix(number: int) -> int:
    """SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (number * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)
