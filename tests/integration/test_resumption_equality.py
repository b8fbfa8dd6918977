"""Resumption of a request in a new engine: equal to an undisturbed run to the last token (real model, fp32)."""

import pytest

from quire.config import EngineOptions
from quire.core.request import KnownOutput, Request
from quire.engine.engine import Engine
from quire.params import SamplingParams
from quire.startup.build import build

PROMPT = [[5 + (11 * i + 3 * salt) % 1900 for i in range(length)] for salt, length in enumerate((3, 40, 17, 70, 9, 33))]
ENDS = tuple(range(200, 1200))  # any of these ends a sequence, so that min_tokens has tokens to ban
SEEDED = {"temperature": 0.9, "seed": 7}
ASKED = [
    {"temperature": 0.0, "ignore_eos": True},
    {**SEEDED, "top_p": 0.95, "top_k": 50, "ignore_eos": True, "n": 3},
    {"temperature": 0.0, "ignore_eos": True, "presence_penalty": -2.0, "logprobs": 2},
    {**SEEDED, "repetition_penalty": 1.4, "frequency_penalty": -2.0, "ignore_eos": True},  # repeats tokens
    {**SEEDED, "min_tokens": 14, "stop_token_ids": ENDS[:64], "logprobs": 0},
    {**SEEDED, "n": 1, "best_of": 4, "stop_token_ids": ENDS[::16]},
]


def make() -> Engine:
    options = EngineOptions(dtype="float32", memory="200MiB", max_num_seqs=16, max_model_len=256)
    return build(options, report=lambda line: None, progress=lambda done, total: None).engine


def run(kills: set[int]):
    """Tokens, logprobs, cumulative logprobs and reasons per sequence. kills: steps before which the engine dies."""
    params = [SamplingParams(max_tokens=24, **asked) for asked in ASKED]
    keys = [(str(i), index) for i, one in enumerate(params) for index in range(one.num_sequences)]
    tokens, likely = {key: [] for key in keys}, {key: [] for key in keys}
    totals, reasons = dict.fromkeys(keys, 0.0), {}
    engine, at = make(), 0
    for i, one in enumerate(params):
        engine.add(Request(str(i), PROMPT[i], one))
    while engine.has_work:
        if at in kills:
            engine = make()
            for i, one in enumerate(params):
                of = [(str(i), index) for index in range(one.num_sequences)]
                known = [KnownOutput(list(tokens[key]), key in reasons, totals[key]) for key in of]
                engine.add(Request(str(i), PROMPT[i], one, known_outputs=known))
        for output in engine.step():
            key = output.request_id, output.index
            tokens[key] += output.token_ids
            if output.logprobs is not None:
                likely[key] += output.logprobs.values[:, 0].tolist()
            if output.cumulative_logprob is not None:
                totals[key] = output.cumulative_logprob
            if output.finish_reason:
                reasons[key] = output.finish_reason
        at += 1
    assert engine.stats().failed_steps == 0
    assert engine.stats().kv_blocks_used == 0
    return tokens, likely, totals, reasons


@pytest.fixture(scope="module")
def undisturbed():
    return run(set())


@pytest.mark.parametrize("kills", [{1}, {5, 6, 13}, {22}])
def test_a_lost_engine_changes_nothing(undisturbed, kills):
    tokens, likely, totals, reasons = run(kills)
    assert tokens == undisturbed[0]
    assert reasons == undisturbed[3]
    for key, values in undisturbed[1].items():
        assert likely[key] == pytest.approx(values, abs=1e-4)
        assert totals[key] == pytest.approx(undisturbed[2][key], abs=1e-3)


def test_the_undisturbed_run_covers_samples_logprobs_and_both_finish_reasons(undisturbed):
    tokens, likely, totals, reasons = undisturbed
    assert len({tuple(tokens["1", i]) for i in range(3)}) == 3, "three samples"
    assert len(tokens["4", 0]) >= 14, "min_tokens"
    assert len(likely["2", 0]) == 24
    assert all(totals["5", i] == pytest.approx(sum(likely["5", i])) for i in range(4))
    assert set(reasons.values()) == {"length", "stop"}
