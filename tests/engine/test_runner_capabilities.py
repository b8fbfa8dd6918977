"""What a runner can do: steps in flight, proposals of drafts, and requests and Steps that need more than it has."""

from dataclasses import replace

import pytest
from constrained_rig import ConstrainedRig
from msgspec import structs
from scripted_adapters import new_adapter
from scripted_constraints import ScriptedConstraints, expected_output
from scripted_engine import VOCAB, Rig

from quire.core.capabilities import Capabilities
from quire.core.request import Request
from quire.core.step import Pooling
from quire.engine.engine import Engine
from quire.errors import ConfigError, RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.runner.scripted_runner import ScriptedRunner, script

DRAFTS = {"speculation": ("suffix",), "num_speculative_tokens": 4, "governs_speculation": False}


@pytest.mark.parametrize("steps_in_flight", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "options", [{}, DRAFTS, {"prefix_index": "radix"}, {"num_host_blocks": 24, "preemption": "swap"}]
)
def test_any_number_of_steps_in_flight_gives_the_same_tokens(steps_in_flight, options):
    rig = Rig(num_blocks=24, steps_in_flight=steps_in_flight, **options)
    prompts = [[i + 1, 2, 3, 4, 5, 6][: 2 + i % 5] for i in range(8)]
    most = 0
    for i, prompt in enumerate(prompts):
        rig.add(str(i), prompt, max_tokens=9 + i, prediction=[3, 1, 2])
    while rig.engine.has_work:
        rig.step()
        most = max(most, len(rig.scheduler.state.in_flight))
    assert rig.tokens == {(str(i), 0): script(prompt, 9 + i, VOCAB) for i, prompt in enumerate(prompts)}
    assert most == steps_in_flight - 1  # between two calls
    assert rig.engine.stats().num_preemptions and not rig.engine.stats().failed_steps
    assert rig.replay().difference == ""


@pytest.mark.parametrize("steps_in_flight", [2, 3, 4])
@pytest.mark.parametrize("often", [0, 2, 3])
@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["", "drafts"])
def test_constrained_sequences_get_masks_behind_all_tokens_before_them(steps_in_flight, often, drafts):
    constraints = ScriptedConstraints(often=often)
    rig = ConstrainedRig(constraints, num_blocks=64, steps_in_flight=steps_in_flight, **drafts)
    lengths = []
    masks = constraints.masks

    def recorded(seq_ids, drafts_of):
        for seq_id in seq_ids:
            seq = rig.scheduler.state.sequences[seq_id]
            lengths.append(len(constraints.outputs[seq_id]) - len(seq.tokens) + len(seq.request.prompt))
            assert seq.num_pending <= 1, "a token before is not known"
        return masks(seq_ids, drafts_of)

    constraints.masks = recorded
    prompts = [[i + 1, 2, 3] for i in range(4)]
    for i, prompt in enumerate(prompts):
        params = {"structured_outputs": StructuredOutputsParams(regex="x")} if i % 2 else {}
        rig.add(str(i), prompt, max_tokens=24, **params)
    rig.run(500)
    for i, prompt in enumerate(prompts):
        expected = expected_output(prompt, constraints, 24)[0] if i % 2 else script(prompt, 24, VOCAB)
        assert rig.tokens[str(i), 0] == expected
    assert lengths and not any(lengths)
    assert rig.replay().difference == ""


def test_a_step_in_flight_that_fails_is_repeated_by_those_behind_it():
    failing = {5, 11}
    rig = Rig(num_blocks=64, steps_in_flight=3, fails=lambda step: step.id in failing)
    for i in range(4):
        rig.add(str(i), [i + 1, 7], max_tokens=12)
    rig.run()
    assert rig.tokens == {(str(i), 0): script([i + 1, 7], 12, VOCAB) for i in range(4)}


def test_more_steps_in_flight_than_the_runner_takes_are_refused():
    with pytest.raises(ConfigError, match="steps_in_flight 5 is more than the 4 that this runner takes"):
        Rig(steps_in_flight=5)
    with pytest.raises(ConfigError, match="steps_in_flight must be at least 1, not 0"):
        Rig(steps_in_flight=0)


class Proposing(ScriptedRunner):
    """Proposes three tokens behind the last one of each chunk that is right. All of them are right, or none is."""

    def __init__(self, *args, prompts, right, **options):
        super().__init__(*args, **options)
        self.texts = [prompt + script(prompt, 40, VOCAB) for prompt in prompts]
        self.right, self.chunks = right, []

    def launch(self, step):
        super().launch(step)
        chunks = zip(step.chunks.rows.tolist(), step.chunks.starts.tolist(), step.chunks.stops.tolist(), strict=True)
        self.chunks.append([(stop, self._tokens[row, :stop].tolist()) for row, _, stop in chunks])

    def collect(self):
        result, chunks = super().collect(), self.chunks.pop(0)
        tokens, proposals = result.tokens.tolist(), []
        for (stop, known), count in zip(chunks, result.counts.tolist(), strict=True):
            sampled, tokens = tokens[:count], tokens[count:]
            (text,) = [text for text in self.texts if text[: stop - count + 1] == known[: stop - count + 1]]
            last = stop - count + 1
            for draft, token in zip(known[last:], sampled, strict=False):
                if draft != token:
                    break
                last += 1
            proposals.append([token if self.right else (token + 1) % VOCAB for token in text[last + 1 : last + 4]])
        return structs.replace(result, proposals=proposals)


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("steps_in_flight", [1, 2])
def test_drafts_that_the_runner_proposes_are_verified(right, steps_in_flight):
    prompts = [[9, 2, 5], [4, 4], [7, 1, 1, 3]]
    rig = Rig(num_blocks=64, steps_in_flight=steps_in_flight, **DRAFTS)
    runner = Proposing(
        rig.cache.config,
        prompts=prompts,
        right=right,
        max_num_seqs=8,
        max_model_len=rig.config.max_model_len,
        vocab_size=VOCAB,
    )
    rig.engine = Engine(rig.scheduler, runner, vocab_size=VOCAB, clock=rig.clock)
    for i, prompt in enumerate(prompts):
        rig.add(str(i), prompt, max_tokens=24)
    rig.run()
    assert rig.tokens == {(str(i), 0): script(prompt, 24, VOCAB) for i, prompt in enumerate(prompts)}
    counts = rig.engine.stats().drafts["runner"]
    assert counts.num_drafts > 0
    assert counts.num_accepted == (counts.num_drafts if right else 0)
    assert rig.replay().difference == ""


ALL = Capabilities(deterministic=True, adapters=True)


@pytest.mark.parametrize(
    ("lacks", "request_of", "message"),
    [
        ({"deterministic": False}, {"params": SamplingParams(deterministic=True)}, "cannot be run deterministically"),
        ({"adapters": False}, {"adapter": new_adapter("pirate")}, "start it with --enable-lora"),
        ({"classifies": True}, {}, "has a classification head: it generates no text"),
        ({"classifies": False}, {"pooling": Pooling.CLASS}, "has no classification head"),
        ({"generates": False}, {}, "has no head over its vocabulary"),
    ],
)
def test_requests_that_need_more_are_refused(lacks, request_of, message):
    request = Request("a", [1], **({"params": SamplingParams()} | request_of))
    with pytest.raises(RequestError, match=message):
        replace(ALL, **lacks).check_request(request)
    replace(ALL, classifies=request.pooling is Pooling.CLASS).check_request(request)
