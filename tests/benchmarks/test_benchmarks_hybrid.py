"""benchmarks/hybrid.py and prefix_states.py at tiny sizes: exact figures are checked, the others only exist."""

import json

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM

from benchmarks import hybrid, hybrid_peer, prefix_states
from benchmarks.cpu.checkpoints import SHAPES
from benchmarks.hybrid import Figure, Seconds, Sizes, Turns
from benchmarks.prefix_states import FLOOR, WORKLOADS, Row

TINY = Sizes((1, 2), prompt=40, steps=2, chat=100, chats=2, answer=2)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("hybrid")


@pytest.fixture
def _without_waiting(monkeypatch):
    monkeypatch.setattr(hybrid, "_SETTLE", 0)


class Counting:
    """A model that records what it is asked."""

    def __init__(self):
        self.asked = []

    def run(self, prompts, num_output):
        self.asked.append((len(prompts), {len(prompt) for prompt in prompts}, num_output))


@pytest.mark.usefixtures("_without_waiting")
@pytest.mark.parametrize("section", ["transformers", "attention", "snapshots"])
def test_every_section_runs(models, section):
    (figures,) = hybrid.measure([section], models, "tiny", TINY, repeat=1, threads=1).values()
    assert len(figures) == {"transformers": 3, "attention": 2, "snapshots": 1}[section]
    for figure in figures:
        assert all(some.keys() == {"cpu", "wall"} for some in figure.seconds.values())
    if section == "attention":
        one, two = (figure.bound - 1 for figure in figures)
        assert two == pytest.approx(2 * one)
    else:
        assert all(seconds > 0 for some in figures[-1].seconds.values() for seconds in some.values())


@pytest.mark.usefixtures("_without_waiting")
def test_a_decode_step_is_measured_with_prompts_of_its_own():
    model, turns = Counting(), Turns({})
    turns.step(model, 3, Sizes(steps=5, start=7))
    assert model.asked == [(3, {7}, 1), (3, {7}, 6)]
    assert turns.prompts(2, 9) != turns.prompts(2, 9)


def test_models_take_turns_and_the_first_round_does_not_count():
    order = []

    def measured(model):
        order.append(model)
        return Seconds(float(len(order)), 0.0)

    times = Turns({"a": "a", "b": "b"}).measure(measured, 2)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert {name: [one.cpu for one in some] for name, some in times.items()} == {"a": [4, 5], "b": [3, 6]}


@pytest.mark.parametrize(
    ("ratio", "goal", "floor", "verdict"),
    [
        (1.7, 1.6, 1.3, "ok"),
        (1.4, 1.6, 1.3, "floor"),
        (1.2, 1.6, 1.3, "MISSED"),
        (1.0, 1.01, 1.03, "ok"),
        (1.02, 1.01, 1.03, "floor"),
        (1.04, 1.01, 1.03, "MISSED"),
    ],
)
def test_a_verdict_knows_the_better_direction(ratio, goal, floor, verdict):
    assert Figure("x", ratio, ratio, goal, floor, {}).verdict == verdict


def test_the_hybrid_and_its_twin_have_equally_many_weights():
    sizes = []
    for shape in ("hybrid-0.5b", "attention-of-hybrid-0.5b"):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(SHAPES[shape]())
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)
    config = SHAPES["hybrid-0.5b"]()
    assert (config.layer_types.count("linear_attention"), config.layer_types.count("full_attention")) == (18, 6)
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert 18 * state * 4 == pytest.approx(19e6, rel=0.01), "bytes of a row"


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_hybrid_with_room_for_snapshots_reuses_almost_what_full_attention_does(workload):
    rows = prefix_states.measure(workload, 2, memory=(16.0,))
    assert {row.fits for row in rows} == {"all", "half"}
    assert all(FLOOR <= row.ratio <= 1 for row in rows), rows


def test_the_table_says_what_is_missed(tmp_path, capsys):
    assert "0.500 (MISSED)" in prefix_states.table([Row("agents", "all", 2.0, 100, 5, 200, 100, 3)])
    assert "0.500 |" in prefix_states.table([Row("agents", "all", 4.0, 100, 5, 200, 100, 3)])
    prefix_states.main(["--only", "agents", "--size", "1", "--json", str(tmp_path / "x.json")])
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert len(rows) == capsys.readouterr().out.count("| agents")
    assert rows[0]["ratio"] == rows[0]["hybrid_cached"] / rows[0]["full_cached"]


def test_the_file_for_llama_cpp_has_as_many_tokens_as_the_model(models):
    file = hybrid_peer.gguf_of("hybrid-tiny", models)
    fields = GGUFReader(file).fields
    assert len(fields["tokenizer.ggml.tokens"].data) == SHAPES["hybrid-tiny"]().vocab_size
