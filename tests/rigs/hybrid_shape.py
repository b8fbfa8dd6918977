"""Sizes of the recurrent states of a hybrid model: 18 layers, 19 MB a sequence without the inputs of tokens."""

from quire.core.states import StateGroup, StateKind

STATE_KIND = StateKind("delta", 16, 128, 4, 16, 128)
STATE_LAYERS = (STATE_KIND,) * 18
MAX_PENDING = 9
BLOCK_BYTES = 18 * 4 * STATE_KIND.numbers(MAX_PENDING)


def state_group(num_blocks: int = 0, num_host_blocks: int = 0) -> StateGroup:
    """The state blocks of the model, in float32."""
    return StateGroup(18, STATE_KIND, "float32", num_blocks, MAX_PENDING, BLOCK_BYTES, num_host_blocks)
