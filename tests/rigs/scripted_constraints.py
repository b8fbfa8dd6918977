"""Constraints with scripted verdicts, for the scripted runner."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.core.constraint import AllowedDrafts, Verdict, allowed_drafts
from quire.core.prerequisite import Prerequisite
from quire.core.request import CONSTRAINT, Request
from quire.runner.scripted_runner import attend, key_after, state_after, token_after


@dataclass
class ScriptedConstraints:
    """Constraints that force tokens, end and fail by a digest of the output so far."""

    often: int = 3  # one of this many outputs forces tokens; 0: none
    longest: int = 7  # the most tokens that are forced at once
    ends_after: int = 10_000  # output tokens
    fails_after: int = 10_000  # output tokens
    vocab_size: int = 50
    outputs: dict[int, list[int]] = field(default_factory=dict)  # by id of an unfinished sequence
    asked: list[list[int]] = field(default_factory=list)  # sequence ids of each call of `masks`

    def verdict(self, output: list[int]) -> Verdict:
        """The verdict after these output tokens. The last one was sampled, if there is any."""
        if len(output) >= self.fails_after:
            return Verdict(error="a scripted error")
        digest = sum((i + 1) * (token + 3) for i, token in enumerate(output)) * 7919 % 1009
        forces = self.often and digest % self.often == 0
        forced = [(digest + 31 * i) % self.vocab_size for i in range(digest % self.longest + 1)] if forces else []
        return Verdict(forced, is_over=len(output) + len(forced) >= self.ends_after)

    def begin(self, seq_id: int, request: Request, known: Sequence[int]) -> Verdict:
        """See Constraints."""
        self.outputs[seq_id] = list(known)
        return self._follow(seq_id)

    def advance(self, seq_id: int, tokens: Sequence[int]) -> Verdict:
        """See Constraints."""
        self.outputs[seq_id] += tokens
        return self._follow(seq_id)

    def end(self, seq_id: int) -> None:
        """See Constraints."""
        self.outputs.pop(seq_id)

    def allowed_drafts(self, seq_id: int, drafts: Sequence[int], most: int) -> AllowedDrafts:
        """See Constraints. All tokens are allowed that the scripted runner may sample."""
        output = list(self.outputs[seq_id])

        def advance(token: int) -> Verdict:
            output.append(token)
            verdict = self.verdict(output)
            output.extend(verdict.forced)
            return verdict

        return allowed_drafts(advance, drafts, most)

    def masks(self, seq_ids: Sequence[int], drafts: Sequence[AllowedDrafts]) -> np.ndarray:
        """See Constraints. The masks are empty: the scripted runner does not read them."""
        self.asked.append(list(seq_ids))
        assert all(seq_id in self.outputs for seq_id in seq_ids)
        return np.zeros((len(seq_ids) + sum(len(one.tokens) for one in drafts), 2), np.uint32)

    def _follow(self, seq_id: int) -> Verdict:
        verdict = self.verdict(self.outputs[seq_id])
        self.outputs[seq_id] += verdict.forced
        return verdict


class ScriptedPrerequisite(Prerequisite):
    """A prerequisite that takes `steps` calls of `finished` for each request. errors: by request id."""

    def __init__(self, steps: int = 0, errors: Mapping[str, str] | None = None, name: str = CONSTRAINT) -> None:
        self.name = name
        self._steps = steps
        self._errors = errors or {}
        self.left: dict[str, int] = {}  # calls until it is ready for a request

    def is_needed(self, request: Request) -> bool:
        return request.is_constrained

    def submit(self, request: Request) -> None:
        self.left[request.id] = self._steps

    def finished(self) -> list[tuple[str, str]]:
        done = [name for name, left in self.left.items() if left == 0]
        self.left = {name: left - 1 for name, left in self.left.items() if left}
        return [(name, self._errors.get(name, "")) for name in done]

    def forget(self, request_id: str) -> None:
        self.left.pop(request_id, None)

    def wait(self, seconds: float) -> None:
        """Return at once: time is virtual."""

    def close(self) -> None:
        """Do nothing."""


def expected_output(
    prompt: list[int], constraints: ScriptedConstraints, max_tokens: int, *, has_states: bool = False
) -> tuple[list[int], list[int], str]:
    """The output of a constrained request, token by token: output, positions of forced tokens, finish reason."""
    output: list[int] = []
    forced: list[int] = []
    sampled = False
    while True:
        verdict = constraints.verdict(output)
        for token in verdict.forced:
            if len(output) == max_tokens:
                return output, forced, "length"
            forced.append(len(output))
            output.append(token)
        if verdict.error:
            return output, forced, "error" if len(output) < max_tokens or not sampled else "length"
        if verdict.is_over:
            return output, forced, "stop"
        if len(output) == max_tokens:
            return output, forced, "length"
        keys, state = [0], 0
        for token in prompt + output:
            keys.append(key_after(keys[-1], token))
            state = state_after(state, token) if has_states else 0
        output.append(token_after(attend(np.array(keys[1:])) + state, constraints.vocab_size))
        sampled = True
