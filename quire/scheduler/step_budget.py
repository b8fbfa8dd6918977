"""The token budget of a step: the number of tokens that are computed within a predicted time.

A step with a long prompt would delay the next token of every sequence that decodes. So while sequences decode, a step
takes about the target for the time between tokens, and prompts are cut accordingly (stall-free batching: Agrawal et
al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024). While none decodes, a step can
take `step_seconds`.
"""

from quire.config import SchedulerConfig
from quire.cost.step_time import StepTime

_DECODE_STEPS = 6  # the chosen target in decode steps: five sixths of the time are left for prompts
_SHORTEST_TARGET = 0.05  # seconds, of a chosen target; readers do not notice shorter pauses


class StepBudget:
    """The budget of the next step. tpot_seconds: the target for the time between tokens; None without one."""

    __slots__ = ("_config", "_pace", "tpot_seconds")

    def __init__(self, config: SchedulerConfig, pace: StepTime) -> None:
        self._config = config
        self._pace = pace
        self.tpot_seconds = config.target_tpot_seconds

    def choose_target(self, decode_step_seconds: float) -> None:
        """Choose the target, if the config has none, from the measured seconds of a decode step (0: unknown)."""
        if self._config.target_tpot_seconds is None and decode_step_seconds > 0:
            target = max(_SHORTEST_TARGET, _DECODE_STEPS * decode_step_seconds)
            self.tpot_seconds = min(target, self._config.step_seconds)

    def num_tokens(self, *, decoding: bool) -> int:
        """The most tokens of a step, at least 1. decoding: whether a sequence decodes in it."""
        seconds = self._config.step_seconds
        if decoding and self.tpot_seconds is not None:
            seconds = self.tpot_seconds
        return self._pace.tokens_within(seconds, self._config.max_num_batched_tokens)
