"""benchmarks/cpu: every part runs at a tiny size, and wrong answers of an engine raise errors."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.cpu.__main__ import main, parse
from benchmarks.cpu.arrivals import arrivals, num_ticks
from benchmarks.cpu.checkpoints import SHAPES, checkpoint
from benchmarks.cpu.decode_bytes import decode_bytes
from benchmarks.cpu.engines import BEFORE, Answer, Engine, EngineError, start
from benchmarks.cpu.families import FAMILIES, family_report, family_turns
from benchmarks.cpu.gguf_file import gguf_file, types
from benchmarks.cpu.machine import matmul_rate, read_rate
from benchmarks.cpu.turns import Turns, figures
from benchmarks.workloads import Query, Workload, workload
from quire.models.config_fields import Fields
from quire.models.config_reader import decoder_config
from quire.models.description import FAMILIES as ARCHITECTURES
from quire.models.description import describe
from quire.startup.model_loading import open_model

PROTOCOL = Path(__file__).resolve().parents[2] / "benchmarks/cpu/drivers"

HONEST = f"""
import sys, time
sys.path.insert(0, {str(PROTOCOL)!r})
from protocol import Driven, drive

def load(settings):
    print("noise of the engine")
    return Driven(lambda queries: [query["out"] for query in queries], "1", 1)
"""


STEP = "tiny decode step of 16 rows, CPU s"


def fake(folder: Path, source: str, name: str = "fake") -> Engine:
    script = folder / f"{name}.py"
    script.write_text(source)
    return Engine(name, sys.executable, folder, driver=script)


def honest(folder: Path, name: str = "fake") -> Engine:
    return fake(folder, HONEST + "\ndrive(load)", name)


def small(name: str, seed: int) -> Workload:
    return Workload(name, seed, [Query([1, 2, 3], 4), Query([5 + seed], 2)])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict:
    folder = tmp_path_factory.mktemp("cpu")
    arguments = [
        "--shapes",
        "tiny",
        "--workloads",
        "W1,W3",
        "--repeat",
        "1",
        "--peer",
        f"transformers={sys.executable}",
        "--requests",
        "6",
    ]
    main([*arguments, "--json", str(folder / "figures.json"), "--table", str(folder / "table.md")])
    return {**json.loads((folder / "figures.json").read_text()), "table": (folder / "table.md").read_text()}


def test_quire_and_a_peer_are_measured_on_the_same_work(results):
    part = results["shapes"]["tiny"]
    assert set(part["engines"]) == {"quire", "transformers"}
    for name in ("W1", "W3"):
        work, done = workload(name), part["workloads"][name]
        assert done["num_output_tokens"] == work.num_output_tokens
        assert done["num_prompt_tokens"] == work.num_prompt_tokens
        ours, theirs = (done["figures"][engine] for engine in ("quire", "transformers"))
        assert set(ours) == set(theirs) == set(done["ratios"]["transformers"])
        ratio = ours["output tok/s"]["median"] / theirs["output tok/s"]["median"]
        assert done["ratios"]["transformers"]["output tok/s"]["median"] == pytest.approx(ratio)
    assert part["workloads"]["W1"]["figures"]["quire"]["decode tok/s"]["min"] > 0


def test_each_engine_reports_version_threads_start_time_and_memory(results):
    part = results["shapes"]["tiny"]
    for facts in part["engines"].values():
        assert facts["version"] and facts["threads"] >= 1
        assert 0 < facts["cold_start_seconds"] < 60
        assert facts["memory"]["bytes"] > part["weight_bytes"] > 1e6
        assert facts["memory"]["kind"] in ("PSS", "RSS")
    assert any(note.startswith("kernels ") for note in part["engines"]["quire"]["notes"])


def test_http_is_measured_beside_the_same_queries_in_process(results):
    done = results["http"]["workloads"]["64 streams"]
    assert done["num_queries"] == 64 and done["num_output_tokens"] == 64 * 64
    rates = {engine: done["figures"][engine]["output tok/s"]["median"] for engine in ("http", "quire")}
    assert done["ratios"]["quire"]["output tok/s"]["median"] == pytest.approx(rates["http"] / rates["quire"])


def test_both_decoders_of_a_shape_are_measured_with_one_thread(results):
    part = results["families"]["shapes"]["tiny"]
    assert [facts["threads"] for facts in part["engines"].values()] == [1, 1]
    ours, theirs = (part["figures"][name] for name in ("quire", "quire:transformers"))
    assert set(ours) == set(theirs) == set(results["families"]["bounds"])
    for what, ratio in part["ratios"]["quire:transformers"].items():
        assert ours[what]["median"] > 0
        assert ratio["median"] == pytest.approx(theirs[what]["median"] / ours[what]["median"])


def test_a_decode_step_is_the_difference_of_two_runs(tmp_path):
    turns = family_turns(tmp_path, repeat=2)
    seconds = {"1 row": 65, "1 row, first token": 1, "16 rows": 130, "16 rows, first token": 2, "prompt": 7}
    for factor, engine in enumerate(turns.engines, 1):
        turns.facts[engine.name] = {}
        for name in turns.names:
            turns.answers[name][engine.name] = [Answer(0.0, None, factor * seconds[name] * n) for n in (1, 2)]
    report = family_report(turns)
    assert [figure["values"] for figure in report["figures"]["quire"].values()] == [[1, 2], [2, 4], [7, 14]]
    assert [ratio["values"] for ratio in report["ratios"]["quire:transformers"].values()] == [[2, 2]] * 3


@pytest.mark.parametrize("shape", FAMILIES)
def test_quires_decoder_has_the_shapes_of_families(shape):
    config = SHAPES[shape]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    fields = Fields(json.loads(config.to_json_string(use_diff=False)), Path("config.json"))
    decoder = decoder_config(ARCHITECTURES[type(model).__name__], fields, None)
    assert decoder.num_layers == config.num_hidden_layers
    assert 2.5e8 < sum(parameter.numel() for parameter in model.parameters()) < 5e8


def test_streams_of_a_server_are_measured_while_others_arrive(results):
    part = results["arrivals"]
    assert part["requests per second at capacity"] > 0
    assert set(part["runs"]) == {"0.5 of capacity", "1 of capacity"}
    for runs in part["runs"].values():
        (figures,) = runs["quire"]
        assert 0 < figures["median between tokens s"] <= figures["p99 between tokens s"]
        assert 0 < figures["median first token s"] <= figures["p99 first token s"]
        assert figures["output tok/s"] > 0


def test_two_servers_take_turns_with_the_same_requests(tmp_path):
    model, ticks = checkpoint("tiny", tmp_path), []
    engines = [Engine("quire", sys.executable, model), Engine(BEFORE, sys.executable, model)]
    part = arrivals(engines, count=4, repeat=2, tick=ticks.append)
    assert len(ticks) == num_ticks(2, 2)
    assert ticks[2:6] == [f"{name} at 0.5 of capacity" for name in ("quire", BEFORE, BEFORE, "quire")]
    for load, runs in part["runs"].items():
        ours, theirs = (runs[name][0]["median first token s"] for name in ("quire", BEFORE))
        assert part["ratios"][load][BEFORE]["median first token s"]["values"][0] == ours / theirs


def test_the_table_has_every_figure(results):
    for what in ("W1 decode tok/s", "W1 first token s", "W1 decode GB/s", "W3 wall s", "64 streams output tok/s", STEP):
        assert f"| {what} | " in results["table"]
    assert "quire / transformers" in results["table"]
    assert results["machine"]["read_gb_per_second"] > 0 and results["machine"]["bf16_matmul_gflops"] > 0


def test_figures_of_a_stream_leave_the_first_token_out():
    one = Workload("x", 0, [Query([1] * 10, 11)])
    assert figures(one, Answer(3.0, 1.0, 0.0)) == {
        "decode tok/s": 5.0,
        "output tok/s": pytest.approx(11 / 3),
        "first token s": 1.0,
    }
    assert figures(Workload("x", 0, [Query([1] * 10, 1)]), Answer(2.0, None, 0.0)) == {"prompt tok/s": 5.0}
    assert figures(small("x", 0), Answer(3.0, None, 0.0)) == {"output tok/s": 2.0, "wall s": 3.0}
    # 5 tokens a second, each with the weights and the KV of 15.5 tokens
    assert figures(one, Answer(3.0, 1.0, 0.0), (10**8, 10**6))["decode GB/s"] == pytest.approx(0.5775)


def test_rates_of_the_machine_are_positive():
    assert read_rate(2**20) > 0 and matmul_rate(32) > 0


def test_a_machine_whose_products_are_slow_multiplies_smaller_matrices(monkeypatch):
    monkeypatch.setattr("benchmarks.cpu.machine._LONG_ENOUGH", 0.0)
    assert matmul_rate(2**20) > 0  # matrices of this size would have 2 TB


def test_turns_go_round_and_back(tmp_path):
    engines = [honest(tmp_path, "a"), honest(tmp_path, "b")]
    ticks: list[str] = []
    turns = Turns(engines, ["x", "y"], repeat=2, make=small)
    turns.side_by_side(ticks.append)
    assert ticks == ["a x", "b x", "b x", "a x", "a y", "b y", "b y", "a y"] and turns.num_turns == len(ticks)
    assert len(turns.report()["workloads"]["y"]["ratios"]["b"]["wall s"]["values"]) == 2


def test_engines_that_run_alone_are_started_for_each_round(tmp_path):
    ticks: list[str] = []
    turns = Turns([honest(tmp_path, "a"), honest(tmp_path, "b")], ["x", "y"], repeat=2, make=small)
    turns.alone(ticks.append)
    assert ticks == ["a x", "a y", "b x", "b y", "b x", "b y", "a x", "a y"]
    assert len(turns.report()["engines"]["a"]["cold_starts"]) == 2


def test_the_first_token_of_a_single_query_takes_a_run_of_its_own(tmp_path):
    with start(honest(tmp_path)) as running:
        answer = running.run(Workload("one", 0, [Query([1, 2], 3)]))
        assert answer.ttft is not None
        assert running.run(small("two", 0)).ttft is None


def test_an_output_of_the_wrong_length_is_an_error(tmp_path):
    source = HONEST.replace('query["out"] for', 'min(query["out"], 3) for')
    with start(fake(tmp_path, source + "\ndrive(load)")) as running, pytest.raises(EngineError) as caught:
        running.run(small("x", 0))
    assert "x: outputs have [3, 2] tokens, asked for were [4, 2]" in str(caught.value)
    assert "noise of the engine" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("input(); print('hello')", "answered 'hello', which is no JSON object"),
        ("input(); print(5)", "answered '5', which is no JSON object"),
        ("input(); print('{}')", "lacks ready, version, threads"),
        ("raise SystemError('no such kernel')", "no such kernel"),
        ("import os; input(); os._exit(3)", "ended without an answer, with status 3"),
        ("import os; os.close(0); import time; time.sleep(0.3)", "ended"),
    ],
)
def test_an_engine_that_does_not_keep_to_the_protocol_is_an_error(tmp_path, source, problem):
    with pytest.raises(EngineError) as caught:
        start(fake(tmp_path, source))
    assert str(caught.value).startswith("fake ") and problem in str(caught.value)


def test_memory_counts_what_the_engine_started(tmp_path):
    child = "import sys; held = bytes(range(250)) * 400_000; print(len(held), flush=True); sys.stdin.read()"
    parent = f"""
import subprocess
child = subprocess.Popen([sys.executable, "-c", {child!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
child.stdout.readline()
drive(load)
child.communicate()
"""
    with start(fake(tmp_path, HONEST + parent)) as running:
        assert 1e8 < running.memory()["bytes"] < 3e8


def test_quantized_weights_are_those_of_quire_alone(tmp_path):
    engine = Engine("quire", sys.executable, checkpoint("tiny", tmp_path), quantization="int8")
    with start(engine) as running:
        assert any(note.startswith("weights rounded: ") for note in running.facts["notes"])
    with start(replace(honest(tmp_path), quantization="int8")) as running:
        assert running.run(small("W", 1)).seconds > 0
    assert parse(["--quantization", "int4"]).quantization == "int4"


def test_a_type_of_gguf_files_gives_quire_the_same_file_as_its_peers(tmp_path):
    engine = Engine("quire:Q4_0", sys.executable, checkpoint("tiny", tmp_path), quantization="Q4_0")
    with start(engine) as running:
        assert any(note.startswith("weights as stored: ") for note in running.facts["notes"])
    file = tmp_path / "random-tiny-Q4_0.gguf"
    assert "MB Q8_0" in types(file) and file == gguf_file(engine.model, "Q4_0")


def test_decoding_reads_weights_in_the_schemes_of_the_engine_and_the_experts_of_one_token(tmp_path, saved):
    def bytes_of(name, model, quantization=None):
        return decode_bytes(Engine(name, "", model, quantization=quantization))

    tiny = checkpoint("tiny", tmp_path)
    plain = 2 * describe(tiny).num_parameters
    assert bytes_of("quire", tiny) == bytes_of("vllm", tiny, "int8") == (plain, 2 * 2 * 2 * 2 * 32)
    assert 0.5 < bytes_of("quire", tiny, "int8")[0] / plain < 0.52
    # quire keeps codes and scales as they are stored, but the norms of the file are in float32
    ours, theirs = (bytes_of(name, tiny, "Q8_0")[0] for name in ("quire", "llama_cpp"))
    assert theirs - ours == 2 * 5 * 128
    mixtral = saved("mixtral")[0]
    description = describe(mixtral)
    config = description.config
    skipped = config.vocab_size * config.hidden_size  # the embedding table
    per_expert = 3 * config.hidden_size * config.experts.intermediate_size
    skipped += config.num_layers * (config.experts.num_experts - config.experts.per_token) * per_expert
    assert bytes_of("quire", mixtral)[0] == 2 * (description.num_parameters - skipped)


@pytest.mark.parametrize("kind", ["BF16", "F16", "Q8_0", "Q4_0"])
def test_a_gguf_file_holds_the_model_of_its_checkpoint(tmp_path, kind):
    folder = checkpoint("tiny", tmp_path)
    ours, theirs = (
        open_model(path, "quire", max_model_len=None).description for path in (folder, gguf_file(folder, kind))
    )
    assert theirs.num_parameters == ours.num_parameters
    assert (theirs.kv_layers, theirs.vocab_size) == (ours.kv_layers, ours.vocab_size)


def test_a_peer_may_have_a_quantization_of_its_own():
    python = sys.executable
    names = ["openvino:int4", "quire:none"]
    arguments = [word for name in names for word in ("--peer", f"{name}={python}")]
    assert parse(arguments).peer == [(name, python) for name in names]


def test_only_llama_cpp_makes_files_of_mixed_types(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--quantization", "Q4_K_M"])
    assert "needs --peer llama_cpp=" in capsys.readouterr().err
    with pytest.raises(ValueError, match="only llama_cpp can make it"):
        gguf_file(tmp_path / "model", "Q4_K_M")


@pytest.mark.parametrize(
    "arguments", [["--peer", name] for name in ("vllm", "nobody=x", "vllm=/no", "quire=/no", "openvino:int3=/no")]
)
def test_a_peer_is_a_known_name_and_an_interpreter(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert "argument --peer" in capsys.readouterr().err


def test_another_version_of_quire_is_imported_from_its_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--before", str(tmp_path)])
    assert "argument --before: " in capsys.readouterr().err
    kernels = tmp_path / "quire" / "kernels" / "cpu"
    kernels.mkdir(parents=True)
    (kernels / "_C.abi3.so").touch()
    assert parse(["--before", str(tmp_path)]).before == tmp_path
    (tmp_path / "quire" / "__init__.py").write_text("__version__ = 'the one before'")
    source = HONEST.replace('"1", 1', "__import__('quire').__version__, 1")
    driver = fake(tmp_path, source + "\ndrive(load)").driver
    with start(Engine(BEFORE, sys.executable, tmp_path, driver=driver, checkout=tmp_path)) as running:
        assert running.facts["version"] == "the one before"


@pytest.mark.parametrize("arguments", [["--shapes", "2b"], ["--workloads", "W1,W9"], ["--repeat", "0"]])
def test_unknown_shapes_and_workloads_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert arguments[0] in capsys.readouterr().err
