"""What a pattern may cost. Counts, no clocks: a pattern is refused on every machine or on none."""

from quire.errors import RequestError

MAX_NESTING = 64  # groups within groups
MAX_RANGES = 4096  # of one character class
MAX_NFA_STATES = 50_000
MAX_PARTS = 60_000  # of a tree, as often as each is built
MAX_DFA_STATES = 20_000
MAX_EFFORT = 1_500_000  # NFA states looked at while states are put together: about a quarter of a second
MAX_ENTRIES = 8_000_000  # of a transition table: 32 MB
MAX_MASK_BYTES = 8 << 20  # of the token masks that one grammar remembers


def too_complex(what: str, most: int, param: str) -> RequestError:
    """The error for a pattern that needs more than `most` of `what`."""
    advice = "shorten it, lower its repetition counts, or use the llguidance backend"
    name = {"json": "json schema"}.get(param, param)
    return RequestError(f"the {name} is too complex for the fsm backend: more than {most:,} {what}; {advice}", param)
