"""A rig whose requests have scripted constraints."""

from scripted_constraints import ScriptedPrerequisite
from scripted_engine import VOCAB, Rig

from quire.engine.engine import Engine


class ConstrainedRig(Rig):
    """A rig whose requests are constrained by ScriptedConstraints."""

    def __init__(self, constraints, *, compile_steps=0, errors=(), **options):
        super().__init__(**options)
        self.constraints = constraints
        self.forced: dict[tuple[str, int], list[int]] = {}
        scheduler = type(self.scheduler)(self.config, self.cache, self.file_again(), constraints)
        runner = self.engine.runner
        self.compiler = ScriptedPrerequisite(compile_steps, dict(errors))
        self.scheduler = scheduler
        self.engine = Engine(
            scheduler,
            runner,
            vocab_size=VOCAB,
            prerequisites=[self.compiler],
            adapter_loader=self.loader,
            clock=self.clock,
        )

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
        assert self.constraints.outputs == {}, "constraints of sequences that are over"
