"""The token budget of a step: the number of tokens that are computed within a predicted time.

A step with a long prompt would delay the next token of every sequence that decodes. So while sequences decode, a step
takes about the target for the time between tokens, and prompts are cut accordingly (stall-free batching: Agrawal et
al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", 2024). While none decodes, a step can
take `step_seconds`.
"""

from math import ceil

from quire.config import SchedulerConfig
from quire.cost.step_time import CostModel

_LEAST_STEPS, _MOST_STEPS = 8, 16  # the chosen target, in decode steps of one sequence;
_STEPS_PER_OTHER = 2  # between these, so many for each further sequence: prompts then wait in most steps
_PROMPT_PART = 0.25  # least part of the tokens of a target that prompts get, in addition to those of other sequences
_SHORTEST_TARGET = 0.05  # seconds, of a chosen target; readers do not notice shorter pauses
_FIXED_TIMES = 8  # the chosen time of a step of prompts alone, in fixed times of a step;
_SHORTEST_PROMPT_STEP = 0.1  # at least so many seconds


class StepBudget:
    """The budget of the next step."""

    __slots__ = ("_chooses_target", "_config", "_costs")

    def __init__(self, config: SchedulerConfig, costs: CostModel) -> None:
        self._config = config
        self._costs = costs
        self._chooses_target = False

    def choose_target(self) -> None:
        """From now on, choose a target from the measured decode steps, if the config has none."""
        self._chooses_target = True

    def target_seconds(self, num_sequences: float) -> float | None:
        """The target for the time between tokens while `num_sequences` sequences run; None without one."""
        if self._config.target_tpot_seconds is not None:
            return self._config.target_tpot_seconds
        if not self._chooses_target:
            return None
        num_steps = min(max(_LEAST_STEPS, _STEPS_PER_OTHER * (num_sequences - 1)), _MOST_STEPS)
        return min(max(_SHORTEST_TARGET, num_steps * self._costs.shortest_decode_seconds), self._config.step_seconds)

    def spare(self, num_sequences: float, *, decoding: bool) -> float:
        """Tokens of a step beyond one for each of `num_sequences`; negative if these exceed the budget.

        decoding: whether a sequence decodes in the step. Prompts then get a part of the target's tokens, however many
        sequences decode, so that they do not wait for these to end.
        """
        most = self._config.max_num_batched_tokens
        target = self.target_seconds(num_sequences) if decoding else None
        if target is None:
            return self._costs.step_time.tokens_within(self._prompt_seconds, most) - num_sequences
        tokens = self._costs.step_time.tokens_within(target, most)
        return max(tokens - num_sequences, min(ceil(_PROMPT_PART * tokens), most - num_sequences))

    @property
    def _prompt_seconds(self) -> float:
        """The time of a step in which no sequence decodes."""
        if not self._chooses_target:
            return self._config.step_seconds
        chosen = max(_SHORTEST_PROMPT_STEP, _FIXED_TIMES * self._costs.step_time.fixed)
        return min(chosen, self._config.step_seconds)
