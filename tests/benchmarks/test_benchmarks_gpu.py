"""benchmarks/gpu: every part runs at a tiny size on the CPU, and errors become reasons of skipped measurements."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.cpu.checkpoints import SHAPES
from benchmarks.cpu.families import FAMILIES
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import check, processes
from benchmarks.gpu.goals import GOALS, judged
from benchmarks.gpu.part import Part
from benchmarks.gpu.products import weights
from benchmarks.gpu.serving import make

ROOT = Path(__file__).resolve().parents[2]
TINY = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny"]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Figures and tables of a whole run."""
    folder = tmp_path_factory.mktemp("gpu")
    figures, table = folder / "figures.json", folder / "table.md"
    command_line = [*TINY, "--seconds", "60", "--json", str(figures), "--table", str(table)]
    subprocess.run(command_line, cwd=ROOT, check=True, timeout=240, capture_output=True)
    return json.loads(figures.read_text()), table.read_text()


@pytest.fixture
def part(tmp_path):
    return Part("some", tmp_path / "some.json", time.monotonic() + 60, {})


def rows(results, name):
    return {row["what"]: row for row in results[0]["parts"][name]["rows"]}


def test_every_part_ends_by_itself(results):
    parts = results[0]["parts"]
    assert list(parts) == list(command.PARTS)
    assert {part["ended"] for part in parts.values()} == {"by itself"}
    assert all(part["rows"] for part in parts.values())


def test_parts_that_need_a_gpu_are_skipped_with_a_reason(results):
    skipped = {each["what"]: each["why"] for part in results[0]["parts"].values() for each in part["skipped"]}
    assert skipped.pop("tiny, host time") == "it is the time beside a CUDA graph"
    skipped.pop("flashinfer", None)
    assert not skipped


def test_limits_are_what_the_shares_are_of(results):
    device = rows(results, "limits")["device"]
    assert min(device[name] for name in ("copy_gb_per_second", "read_gb_per_second", "bf16_tflops")) > 0
    decode = rows(results, "attention")["decode, batch 2, context 20"]
    assert decode["share_of_copy"] == pytest.approx(decode["gb_per_second"] / device["copy_gb_per_second"])


def test_attention_is_measured_in_both_types_and_beside_torch(results):
    decode = rows(results, "attention")["decode, batch 2, context 20"]
    assert decode["gb_per_second"] == pytest.approx(2 * 2 * 20 * 2 * 32 * 2 / decode["us"] / 1e3)
    assert decode["fp8_speedup"] == pytest.approx(decode["us"] / decode["fp8_us"])
    assert decode["paged_over_contiguous"] > 0 and decode["sdpa_over_ours"] > 0
    prefill = rows(results, "attention")["prefill of 8 at 16"]
    assert prefill["tflops"] == pytest.approx(4 * sum(range(17, 25)) * 4 * 32 / prefill["us"] / 1e6)


def test_products_are_bound_by_one_or_the_other(results):
    found = rows(results, "gemm")
    assert len(found) == 2 * len(weights("tiny"))
    assert {row["bound"] for row in found.values()} <= {"memory", "products"}
    gated = found["tiny gate and up, 1 rows"]
    assert gated["int4_speedup"] == pytest.approx(gated["us"] / gated["int4_us"]) and gated["int8_us"] > 0


def test_mixtures_of_experts_are_measured_by_both_ways(results):
    found = rows(results, "experts")
    assert set(found) == {"tiny, 1 tokens", "tiny, 33 tokens"}
    assert all(row["share_of_bound"] > 0 and row["tflops"] > 0 for row in found.values())
    assert "own_over_library" not in found["tiny, 1 tokens"]


def test_steps_have_bounds(results):
    found = rows(results, "step")
    for what in ("tiny decode, batch 1", "tiny prefill, 8 tokens"):
        assert found[what]["share_of_bound"] == pytest.approx(found[what]["bound_ms"] / found[what]["ms"])


def test_engines_answer_the_same_queries(results):
    found = rows(results, "serving")
    for what in ("tiny nano-vllm", "tiny sharegpt"):
        row = found[what]
        ratio = row["quire tok/s"] / row["transformers tok/s"]
        assert row["quire / transformers"] == pytest.approx(ratio)
    assert found["tiny quire"]["version"] and found["tiny transformers"]["version"]


def test_the_table_has_goals_and_figures(results):
    for text in ("### goals on an H200", "share of copy", "| tiny decode, batch 1 |", "quire / transformers"):
        assert text in results[1]


def test_an_error_is_a_reason(part):
    def broken():
        raise ZeroDivisionError("by nothing")

    assert not part.attempt("this", broken)
    assert part.attempt("that", lambda: part.row("that", figure=1))
    assert json.loads(part.file.read_text()) == {
        "rows": [{"what": "that", "figure": 1}],
        "skipped": [{"what": "this", "why": "ZeroDivisionError: by nothing"}],
    }


def test_a_part_past_its_deadline_is_interrupted_and_the_rest_skipped(part):
    part.deadline = time.monotonic() + 0.2
    inner: list[bool] = []

    def outer():
        inner.append(part.attempt("quick", lambda: None))
        while True:
            time.sleep(0.01)

    assert not part.attempt("endless", outer) and inner == [True]
    assert not part.attempt("later", lambda: None)
    assert [each["why"] for each in part.skipped] == ["it took longer than there was time", "no time left"]


def settings(folder: Path) -> processes.Settings:
    return processes.Settings("cpu", tiny=True, shapes=["tiny"], models=folder, peers={}, repeat=1)


def test_without_time_everything_is_skipped(tmp_path):
    found = processes.run("limits", "limits", settings(tmp_path), {}, 0.0, lambda found: None)
    assert found["rows"] == [] and found["ended"] == "by itself"
    assert {each["why"] for each in found["skipped"]} == {"no time left"}


def test_a_process_that_fails_or_hangs_leaves_a_reason(tmp_path, monkeypatch):
    reports: list[dict] = []
    found = processes.run("odd", "nowhere", settings(tmp_path), {}, 30, reports.append)
    assert found["ended"] == "with status 1" and "nowhere" in found["skipped"][0]["why"]
    assert reports[-1] is found
    monkeypatch.setattr(processes, "GRACE", 0.0)
    assert "was ended" in processes.run("limits", "limits", settings(tmp_path), {}, 0.0, reports.append)["ended"]


def test_goals_are_judged():
    figures = {"decode, batch 32, context 4096": {"share_of_copy": 0.8, "fp8_speedup": 1.9}}
    found = judged({"attention": {"rows": [{"what": what, **row} for what, row in figures.items()]}})
    assert {(goal["figure"], goal["verdict"]) for goal in found} == {
        ("share_of_copy", "floor"),
        ("fp8_speedup", "goal"),
        ("share_of_copy", "not measured"),
    }
    slow = {"what": "llama-8b decode, batch 1", "host_share": 0.2, "share_of_bound": 0.1}
    verdicts = {goal["figure"]: goal["verdict"] for goal in judged({"step": {"rows": [slow]}}) if goal["value"]}
    assert verdicts == {"host_share": "missed", "share_of_bound": "missed"}
    assert {goal.part for goal in GOALS} < set(command.PARTS)


def test_a_check_is_one_command_of_runs_that_end_in_time():
    assert sum(check.SECONDS.values()) < 20 * 60
    assert max(check.SECONDS.values()) <= 10 * 60
    parts = [*check.parts("kernels", dry=False, extra=()), *check.parts("models", dry=False, extra=())]
    files = {Path(argument).name for part in parts for argument in part.command}
    assert files >= {file.name for file in (ROOT / "tests" / "kernels" / "triton").glob("test_triton_*.py")}
    assert check.parts("memory", dry=True, extra=()) == "it needs a GPU"
    (speed,) = check.parts("speed", dry=True, extra=["--only", "limits"])
    assert speed.command[-5:] == ("--device", "cpu", "--tiny", "--only", "limits")
    assert "gpu-check" in (ROOT / "Makefile").read_text()


def test_a_gpu_check_reports_passed_failed_and_skipped_parts(tmp_path, monkeypatch, capsys):
    def some(run, *, dry, extra):
        if run == "memory":
            return "it needs a GPU"
        codes = {
            "kernels": ["print('3 passed')", "print('E 1 != 2'); exit(1)"],
            "models": ["import time; time.sleep(9)"],
        }
        return [check.Part(code, (sys.executable, "-c", code), {}) for code in codes[run]]

    monkeypatch.setattr(check, "parts", some)
    monkeypatch.setattr(check, "SECONDS", {"kernels": 30, "models": 0.3, "memory": 1, "speed": 1})
    file = tmp_path / "check.json"
    assert check.main(["--dry-run", "--run", "kernels", "models", "memory", "--json", str(file)]) == 1
    found = [(each["run"], each["result"], each["why"]) for each in json.loads(file.read_text())["outcomes"]]
    assert found == [
        ("kernels", "passed", "3 passed"),
        ("kernels", "failed", "E 1 != 2"),
        ("models", "failed", "it was ended after 1 s"),
        ("memory", "skipped", "it needs a GPU"),
    ]
    assert capsys.readouterr().out.endswith("1 passed, 2 failed, 1 skipped\n")
    assert check.main(["--dry-run", "--run", "memory"]) == 0


def test_without_a_gpu_the_check_suggests_dry_run(monkeypatch, capsys):
    monkeypatch.setattr(check, "has_gpu", lambda: False)
    with pytest.raises(SystemExit):
        check.main(["--run", "kernels"])
    assert "torch finds no GPU here; --dry-run tries everything" in capsys.readouterr().err


def test_a_seed_selects_tokens_and_never_lengths():
    one, other, warm = make("nano-vllm", 1), make("nano-vllm", 2), make("nano-vllm", 1, warm_up=True)
    lengths = [(len(query.prompt), query.num_output_tokens) for query in one.queries]
    assert lengths == [(len(query.prompt), query.num_output_tokens) for query in other.queries]
    assert one.queries[0].prompt != other.queries[0].prompt
    assert len(lengths) == 256 and min(map(min, lengths)) >= 100 and max(map(max, lengths)) <= 1024
    assert warm.num_output_tokens < one.num_output_tokens / 3


def test_shapes_are_those_of_the_models():
    hybrids = {shape for shape in SHAPES if "hybrid" in shape}
    others = ({"mixtral-small", *FAMILIES} - {"0.5b"}) | hybrids  # the part `mixtures` has experts of its own
    assert set(command.SHAPES) == set(SHAPES) - others
    assert weights("llama-8b")["gate and up"] == (2 * 14336, 4096)
    assert weights("qwen3-0.6b")["qkv"] == (4096, 1024)


@pytest.mark.parametrize(
    "arguments",
    [["--device", "cpu"], ["--shapes", "2b"], ["--peer", "vllm"], ["--peer", "other=python"], ["--repeat", "0"]],
)
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert "error: " in capsys.readouterr().err
