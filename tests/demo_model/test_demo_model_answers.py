"""The embedded model in the whole engine: equal to transformers token for token, with correct answers."""

import json

import pytest
from embedded_model_files import shipped_files

from quire.hub import embedded
from tools.demo_model.score import Score, ScoringRun, main

STRONG = ("facts", "translate", "copy", "needle", "talk", "recall", "reverse", "extract", "tool", "story_qa", "add")
OTHERS = ("sort", "count", "think_sum", "classify", "mixed")


def exam(engine, tasks, chats, dtype="float32", **options):
    folder = embedded.folder()
    return ScoringRun(model=folder, engine=engine, tasks=tasks, chats=chats, dtype=dtype, seed=1, options=options).run()


def test_greedy_answers_equal_those_of_transformers():
    ours, theirs = (exam(engine, STRONG + OTHERS, 3) for engine in ("quire", "transformers"))
    assert len(ours.answers) > 70
    different = [(a, b) for a, b in zip(ours.answers, theirs.answers, strict=True) if a != b]
    assert not different


def test_strong_tasks_are_answered_right():
    run = exam("quire", STRONG, 10)
    assert {score.task: score.rate for score in run.scores if score.rate < 0.9} == {}
    assert min(score.num_answers for score in run.scores) >= 10


def test_bfloat16_and_8_bit_kv_answer_as_many_questions_right():
    exact = exam("quire", STRONG + OTHERS, 6)
    short = [exam("quire", STRONG + OTHERS, 6, "bfloat16", kv_cache_dtype=kind) for kind in ("auto", "fp8", "int8")]
    right, *still = (sum(score.num_right for score in run.scores) for run in (exact, *short))
    assert min(still) >= right - 0.01 * len(exact.answers)


def test_the_scorer_prints_a_table_and_keeps_the_answers(tmp_path, capsys):
    file = tmp_path / "run.json"
    main(["--tasks", "facts,copy@60", "--chats", "2", "--json", str(file)])
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed[:3]] == ["task", "facts", "copy@60"]
    kept = json.loads(file.read_text())
    assert kept["exam"]["engine"] == "quire"
    assert kept["scores"]["facts"]["num_answers"] == sum(a["task"] == "facts" for a in kept["answers"])
    assert all(a["text"] == a["expected"] for a in kept["answers"])


def test_a_score_has_the_binomial_error():
    score = Score("facts", num_answers=100, num_right=80)
    assert (score.rate, score.error) == (0.8, pytest.approx(0.04))


def test_questions_too_long_for_the_model_are_left_out_and_counted(tmp_path):
    for file in shipped_files():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 100}
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    short = ScoringRun(model=tmp_path, tasks=("recall",), chats=6, seed=1).run()
    usual = exam("quire", ("recall",), 6)
    assert 0 < short.num_left_out == len(usual.answers) - len(short.answers)
    assert all(answer.num_prompt_tokens < 100 for answer in short.answers)
    assert f"{short.num_left_out} questions left out" in str(short)
    assert "left out" not in str(usual)
