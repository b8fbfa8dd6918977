"""Constraints with scripted verdicts on the scripted engine."""

from dataclasses import dataclass

import numpy as np
from scripted_engine import VOCAB, Rig

from quire.core.constraint import Verdict
from quire.engine.engine import Engine
from quire.runner.scripted_runner import attend, key_after, token_after


@dataclass
class Whims:
    """Constraints that force tokens, end and fail by a digest of the output so far."""

    often: int = 3  # one of this many outputs forces tokens; 0: none
    longest: int = 7
    ends_after: int = 10_000  # output tokens
    fails_after: int = 10_000

    def __post_init__(self):
        self.outputs: dict[int, list[int]] = {}
        self.asked: list[list[int]] = []

    def verdict(self, output: list[int]) -> Verdict:
        """The verdict after these output tokens. The last one was sampled, if there is any."""
        if len(output) >= self.fails_after:
            return Verdict(error="a whim")
        digest = sum((i + 1) * (token + 3) for i, token in enumerate(output)) * 7919 % 1009
        forces = self.often and digest % self.often == 0
        forced = [(digest + 31 * i) % VOCAB for i in range(digest % self.longest + 1)] if forces else []
        return Verdict(forced, is_over=len(output) + len(forced) >= self.ends_after)

    def begin(self, seq_id, request, known):
        self.outputs[seq_id] = list(known)
        return self.follow(seq_id)

    def advance(self, seq_id, tokens):
        self.outputs[seq_id] += tokens
        return self.follow(seq_id)

    def follow(self, seq_id):
        verdict = self.verdict(self.outputs[seq_id])
        self.outputs[seq_id] += verdict.forced
        return verdict

    def end(self, seq_id):
        self.outputs.pop(seq_id)

    def masks(self, seq_ids):
        self.asked.append(list(seq_ids))
        assert all(seq_id in self.outputs for seq_id in seq_ids)
        return np.zeros((len(seq_ids), 2), np.uint32)


class Slow:
    """A compiler that takes `steps` calls of `finished` for each request."""

    def __init__(self, constraints, steps=0, errors=()):
        self.constraints = constraints
        self.steps = steps
        self.errors = dict(errors)
        self.left: dict[str, int] = {}

    def submit(self, request_id, asked):
        self.left[request_id] = self.steps

    def finished(self):
        done = [name for name, left in self.left.items() if left == 0]
        self.left = {name: left - 1 for name, left in self.left.items() if left}
        return [(name, self.errors.get(name, "")) for name in done]

    def forget(self, request_id):
        self.left.pop(request_id, None)

    def wait(self, seconds):
        pass

    def close(self):
        pass


class FormRig(Rig):
    """A rig whose requests are constrained by Whims."""

    def __init__(self, whims, *, compile_steps=0, errors=(), **options):
        super().__init__(**options)
        self.whims = whims
        self.forced: dict[tuple[str, int], list[int]] = {}
        scheduler = type(self.scheduler)(self.config, self.cache, self.file_again(), whims)
        runner = self.engine._runner
        compiler = Slow(whims, compile_steps, errors)
        self.scheduler = scheduler
        self.engine = Engine(scheduler, runner, vocab_size=VOCAB, compiler=compiler, clock=self.clock)

    def file_again(self):
        self.file.seek(0)
        self.file.truncate()
        return self.file

    def step(self):
        outputs = super().step()
        for output in outputs:
            key = (output.request_id, output.index)
            first = len(self.tokens[key]) - len(output.token_ids)
            self.forced.setdefault(key, []).extend(first + place for place in output.forced)
        return outputs

    def run(self, most=10_000):
        super().run(most)
        assert self.whims.outputs == {}, "constraints of sequences that are over"


def expected(prompt, whims, max_tokens):
    """The expected result, token by token: output, positions of forced tokens, finish reason."""
    output, forced, sampled = [], [], False
    while True:
        verdict = whims.verdict(output)
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
        keys = [0]
        for token in prompt + output:
            keys.append(key_after(keys[-1], token))
        output.append(token_after(attend(np.array(keys[1:])), VOCAB))
        sampled = True
