"""`quire generate`: prompts of the command line and of standard input, streams, schemas."""

import io
import json
import sys

import pytest
from typer.testing import CliRunner

from quire import LLM
from quire.cli import app
from quire.errors import RequestError
from quire.params import SamplingParams, StructuredOutputsParams
from quire.terminal.generate import read_prompts, schema_constraint, write_texts

STORY = "One Tuesday Mira went"


@pytest.fixture(scope="module")
def llm():
    made = LLM(memory="256MiB", threads=1, max_num_seqs=4, speculation="off")
    yield made
    made.close()


class Pieces(io.StringIO):
    """Standard output that keeps what was written at once."""

    def __init__(self):
        super().__init__()
        self.written = []

    def write(self, text):
        self.written.append(text)
        return super().write(text)


def test_the_text_of_one_prompt_comes_in_pieces(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12)
    whole = llm.generate([STORY], params)[0].outputs[0].text
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    write_texts(llm, [STORY], params)
    assert out.getvalue() == f"{whole}\n"
    assert len(out.written) > 5
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    write_texts(llm, [STORY, STORY], params)
    assert out.written == [f"{whole}\n"] * 2


def test_a_schema_constrains_the_text(llm, tmp_path, monkeypatch):
    file = tmp_path / "schema.json"
    file.write_text(json.dumps({"type": "integer", "minimum": 10, "maximum": 99}))
    constraint = schema_constraint(file)
    assert isinstance(constraint, StructuredOutputsParams)
    monkeypatch.setattr(sys, "stdout", out := Pieces())
    write_texts(llm, [STORY], SamplingParams(max_tokens=20, structured_outputs=constraint))
    assert 10 <= int(out.getvalue()) <= 99
    assert schema_constraint(None) is None
    file.write_text("{")
    with pytest.raises(RequestError, match="is no JSON"):
        schema_constraint(file)


@pytest.mark.parametrize(
    ("given", "read", "prompts"),
    [
        ([], "a\nb\n", ["a\nb"]),
        (["-"], "a", ["a"]),
        (["x", "-", "y"], "a", ["x", "a", "y"]),
        (["x"], "a", ["x"]),
    ],
)
def test_a_dash_or_no_prompt_is_standard_input(given, read, prompts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(read))
    assert read_prompts(given) == prompts


def test_an_empty_input_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(RequestError, match="standard input is empty; give a prompt"):
        read_prompts([])


def test_the_command_has_the_flags_of_sampling():
    shown = CliRunner().invoke(app, ["generate", "--help"]).output
    for flag in ("--top-p", "--seed", "--json-schema", "--temperature"):
        assert flag in shown
