"""The command line: flags from EngineOptions, error messages, start and end of a server."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import fields

import httpx
import pytest
from rich.console import Console
from typer.testing import CliRunner

import quire
from quire.cli import _FLAGS_ELSEWHERE, app, main
from quire.config import EngineOptions
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.params import SamplingParams
from quire.server.options import ServerOptions
from quire.supervisor.spawn import spawned_engine

INTERVAL = 0.2  # seconds between figures
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TERM": "dumb"}


def run(*args, **more):
    command = [sys.executable, "-c", "from quire.command import main; main()", *args]
    return subprocess.run(command, capture_output=True, text=True, env=ENV, timeout=300, **more)


def help_of(command):
    return CliRunner().invoke(app, [command, "--help-all"], env={"COLUMNS": "200", "TERM": "dumb"}).output


@pytest.mark.parametrize("command", ["serve", "generate", "chat"])
def test_every_option_of_the_engine_is_a_flag(command):
    text = help_of(command)
    for field in fields(EngineOptions):
        if field.name != "model":
            assert f"--{field.name.replace('_', '-')} " in text
    assert "(prototype)" in text


def test_help_has_about_thirty_options_under_headings():
    text = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "100", "TERM": "dumb"}).output
    shown = re.findall(r"^  (--[a-z-]+)", text, re.MULTILINE)
    assert 25 < len(shown) < 40
    assert "--watermark" not in shown
    headings = re.findall(r"^([A-Z].*):$", text, re.MULTILINE)
    assert headings[:4] == ["Arguments", "Options", "Model", "KV cache"] and headings[-1] == "More"
    everything = re.findall(r"^  (--[a-z-]+)", help_of("serve"), re.MULTILINE)
    assert f"--help-all shows {len(set(everything)) - len(set(shown))} more options" in text


def test_the_shell_can_complete_commands(monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda: ("bash", "/bin/bash"))  # the parent may be no shell
    assert "_QUIRE_COMPLETE" in CliRunner().invoke(app, ["--show-completion"], prog_name="quire").output


def test_every_option_of_a_server_is_a_flag(monkeypatch):
    text = help_of("serve")
    assert [field.name for field in fields(ServerOptions) if f"--{field.name.replace('_', '-')} " not in text] == []
    seen = []
    monkeypatch.setattr("quire.serve", lambda options, server, **more: seen.append(server), raising=False)
    given = ServerOptions(
        **{"host": "::1", "port": 9, "served_model_name": ("m", "n"), "api_key_file": "k", "ssl_certfile": "c"},
        **{"ssl_keyfile": "s", "cors_origins": ("https://a.example", "*"), "drain_timeout": 1.5, "watchdog": 0.0},
        **{"engine_restart_timeout": 9.0, "api_key": "sk-of-docker", "unknown_fields": "ignore"},
        **{"store_path": "store.sqlite", "enable_auto_tool_choice": True, "enable_force_include_usage": True},
        **{"root_path": "/llm", "max_logprobs": 20, "disable_any_whitespace": True},
        **{"lora_modules": ("a=p", "b=q"), "lora_dir": "adapters", "data_parallel_size": 3},
        **{"tenant_shuffle_shard": 2, "routing": "cache", "verbose": True},
        **{"metrics_prefix": "vllm:", "access_log": "-", "log_prompts": True, "otlp_endpoint": "http://localhost:4318"},
    )
    flags = []
    for field in fields(ServerOptions):
        value, flag = getattr(given, field.name), f"--{field.name.replace('_', '-')}"
        assert value != field.default
        values = value if isinstance(value, tuple) else [value]
        flags += [flag] if value is True else [part for one in values for part in (flag, str(one))]
    CliRunner().invoke(app, ["serve", *flags], catch_exceptions=False)
    assert seen == [given]


def test_flags_reach_the_engine_options(monkeypatch):
    seen = {}
    monkeypatch.setattr(
        "quire.serve", lambda options, server, **more: seen.update(options=options, server=server), raising=False
    )
    args = ["serve", "/models/x", "--max-num-seqs", "3", "--dtype", "float32", "--memory", "1GiB", "--port", "9"]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0
    assert seen["options"] == EngineOptions(model="/models/x", max_num_seqs=3, dtype="float32", memory="1GiB")
    assert seen["server"] == ServerOptions(port=9)
    CliRunner().invoke(app, ["serve"], catch_exceptions=False)
    assert seen["options"] == EngineOptions()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["serve", "--prot", "9"], "--port"),
        (["serv"], "serve"),
        (["serve", "--dtype", "float33"], "float32"),
        (["serve", "--policy", "fifo"], "'fcfs', 'lpm'"),
        (["serve", "--policy", "dfs-weight"], "use lpm"),
        (["serve", "--port", "99999"], "65535"),
        (["serve", "--max-num-seqs", "many"], "integer"),
    ],
)
def test_an_unknown_flag_command_or_value_is_refused_with_the_nearest(args, says):
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert says in result.output


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_are_not_served_without_keys(host, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quire", "serve", "--host", host, "--port", "0"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "API keys" in capsys.readouterr().err


def test_a_port_in_use_is_an_error_before_anything_is_loaded(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr(sys, "argv", ["quire", "serve", "--port", str(taken.getsockname()[1])])
        with pytest.raises(SystemExit):
            main()
    printed = capsys.readouterr()
    assert "--port" in printed.err
    assert "weights" not in printed.out


def test_a_model_that_is_not_there(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quire", "generate", "a", "--model", "/nowhere"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    assert "/nowhere" in capsys.readouterr().err


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output == f"quire {quire.__version__}\n"


def test_chat_writes_while_it_generates(monkeypatch):
    order = []
    step, write = Engine.step, Console.print
    monkeypatch.setattr(Engine, "step", lambda self: order.append("step") or step(self))
    monkeypatch.setattr(Console, "print", lambda self, text, **how: order.append(text) or write(self, text, **how))
    CliRunner().invoke(app, ["chat", "--temperature", "0", "--memory", "256MiB"], input="Who are you?\n/exit\n")
    pieces = [i for i, what in enumerate(order) if what not in ("step", "")][1:]  # the first is the model's name
    assert order[: pieces[0]].count("step") < 8  # the first word
    assert order[pieces[0] : pieces[-1]].count("step") > 8


def test_help_imports_neither_torch_nor_the_server():
    check = """
import sys, quire.command
sys.argv = ["quire", "serve", "--help"]
try:
    quire.command.main()
except SystemExit as end:
    assert not end.code, end.code
assert not {"torch", "fastapi", "jinja2"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, env=ENV, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


@pytest.mark.parametrize(("number", "flags"), [(signal.SIGINT, []), (signal.SIGTERM, ["--access-log", "-"])])
def test_serve_starts_answers_prints_and_ends_at_a_signal(number, flags):
    """It prints figures while it works, or requests if they are asked for."""
    code = f"""
import quire.server.observability.activity as activity
from quire.command import main
activity.INTERVAL = {INTERVAL}
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, "serve", "--port", "0", "--memory", "256MiB", *flags],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": ENV | {"PYTHONUNBUFFERED": "1"}},
    )

    def until(is_last):
        """The lines that are printed up to one."""
        lines = []
        while not (lines and is_last(lines[-1])):
            lines.append(process.stdout.readline())
            assert lines[-1], process.stderr.read()
        return lines

    def is_figure(line):
        return "output" in line and "tokens/s" in line

    try:
        lines = until(lambda line: line.startswith("try: curl"))
        assert any("KV pool" in line for line in lines)
        url = re.search(r"http://127\.0\.0\.1:\d+", lines[-1]).group()
        body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 3}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        if flags:
            assert json.loads(until(lambda line: line.startswith("{"))[-1])["method"] == "POST"
            time.sleep(3 * INTERVAL)  # in which figures would be printed
        else:
            until(is_figure)
        process.send_signal(number)
        printed, errors = process.communicate(timeout=300)
        assert (process.returncode, errors) == (0, "")
        assert not [line for line in printed.splitlines() if line.startswith("{") or (flags and is_figure(line))]
    finally:
        process.kill()
        process.communicate()


def test_the_engine_process_starts_before_the_command_line_is_imported():
    commands = [
        ["serve", "--no-such-flag"],  # the only one that starts it
        *(["serve", "--help"], ["serve", "model", "--help-all"], ["--version"], []),
    ]
    code = f"""
import contextlib, sys, quire.command
quire.command.spawned_engine = lambda: print("spawned", "quire.cli" in sys.modules) or contextlib.nullcontext()
for arguments in {commands}:
    sys.argv = ["quire", *arguments]
    print("command", arguments)
    with contextlib.suppress(SystemExit):
        quire.command.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENV, timeout=300)
    lines = [line for line in done.stdout.splitlines() if line.startswith(("spawned", "command"))]
    first, *others = [f"command {arguments}" for arguments in commands]
    assert lines == [first, "spawned False", *others], done.stderr


def test_the_engine_process_ends_at_once_if_the_command_line_is_wrong():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "from quire.command import main; main()", "serve", "--no-such-flag"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # the engine process has it, too
        text=True,
        env=ENV,
        timeout=300,
    )
    assert done.returncode == 2 and "no-such-flag" in done.stdout.lower() and "Warning" not in done.stdout


def test_serve_uses_the_engine_process_that_it_was_given(monkeypatch):
    used = []
    monkeypatch.setattr("quire.serve", lambda *_, spawned, **__: used.append(spawned), raising=False)
    with spawned_engine() as spawned:
        CliRunner().invoke(app, ["serve"], obj=spawned, catch_exceptions=False)
        CliRunner().invoke(app, ["serve"], catch_exceptions=False)
        assert used[0] is spawned is not used[1] is not None
    assert [one.process.poll() is not None for one in used] == [True, True]


def test_generate_and_replay(tmp_path):
    journal = tmp_path / "journal"
    flags = ["--max-tokens", "5", "--temperature", "0", "--memory", "256MiB", "--journal", str(journal)]
    result = run("generate", "One Tuesday Mira went", "Hello", *flags)
    assert result.returncode == 0
    assert len(result.stdout.splitlines()) == 2
    replayed = CliRunner().invoke(app, ["replay", str(journal)])
    assert replayed.exit_code == 0
    assert "all the same" in replayed.output
    assert CliRunner().invoke(app, ["replay", str(tmp_path / "nothing")]).exit_code == 1


def test_replay_of_another_schedule(monkeypatch, tmp_path):
    report = type("Report", (), {"num_steps": 3, "difference": "step 2: one more chunk"})
    monkeypatch.setattr("quire.scheduler.journal.replay_journal", lambda path: report)
    file = tmp_path / "journal"
    file.write_bytes(b"")
    result = CliRunner().invoke(app, ["replay", str(file)])
    assert result.exit_code == 1
    assert "one more chunk" in result.output


def test_chat_keeps_the_conversation():
    turns = "Hello! Who are you?\n\nWhat is the capital of France?\n/exit\n"
    result = CliRunner().invoke(app, ["chat", "--temperature", "0", "--memory", "256MiB"], input=turns)
    assert result.exit_code == 0
    assert "Pip" in result.output
    assert "Fernhill" in result.output


@pytest.mark.parametrize("command", ["serve", "chat", "doctor"])
def test_the_model_is_an_argument_or_a_flag(command, monkeypatch):
    used = []
    monkeypatch.setattr("quire.serve", lambda options, *_, **__: used.append(options.model))
    monkeypatch.setattr("quire.LLM", lambda model, **_: used.append(model) or sys.exit(0))
    monkeypatch.setattr("quire.examine", lambda options, *_, **__: used.append(options.model) or [])
    for arguments in (["folder"], ["--model", "folder"], ["folder", "--model", "folder"]):
        CliRunner().invoke(app, [command, *arguments])
    assert used == ["folder"] * 3
    result = CliRunner().invoke(app, [command, "folder", "--model", "other"])
    assert result.exit_code == 2 and "given twice" in result.output


@pytest.mark.parametrize(
    ("flags", "temperature", "top_p"), [([], 0.2, 0.9), (["--temperature", "0", "--top-p", "1"], 0.0, 1.0)]
)
def test_a_chat_is_sampled_as_the_model_recommends(flags, temperature, top_p, monkeypatch):
    class Model:
        def get_default_sampling_params(self):
            return SamplingParams(temperature=0.2, top_p=0.9)

        def close(self):
            pass

    used = []
    monkeypatch.setattr("quire.LLM", lambda *_, **__: Model())
    monkeypatch.setattr("quire.cli.converse", lambda _llm, params, *_: used.append((params.temperature, params.top_p)))
    CliRunner().invoke(app, ["chat", *flags], catch_exceptions=False)
    assert used == [(temperature, top_p)]


def test_flags_of_other_engines_have_a_hint(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quire", "serve", "--gpu-memory-utilization=0.9"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert capsys.readouterr().err == "quire: there is no --gpu-memory-utilization; use --memory\n"


def test_a_prompt_may_be_the_flag_of_another_engine(monkeypatch):
    used = []
    monkeypatch.setattr("quire.cli.app", lambda **_: used.append(sys.argv[1:]))
    monkeypatch.setattr(sys, "argv", ["quire", "generate", "--", "--tp"])
    main()
    assert used == [["generate", "--", "--tp"]]


def test_hints_name_flags_that_exist_and_no_flag_has_one():
    help_texts = " ".join(CliRunner().invoke(app, [command, "--help-all"]).output for command in ("serve", "chat"))
    flags = set(re.findall(r"--[a-z][a-z-]+", help_texts))
    for name, hint in _FLAGS_ELSEWHERE.items():
        assert name not in flags
        assert set(re.findall(r"--[a-z-]+", hint)) <= flags


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "plan", "bench serve", "run-batch", "calibrate"])
def test_an_error_names_each_option_as_its_flag(command, monkeypatch, capsys):
    shown = CliRunner().invoke(app, [*command.split(), "--help-all"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    flags = [
        flag for flag in re.findall(r"^  (--[a-z][a-z-]+)", shown, re.MULTILINE) if flag not in ("--help", "--help-all")
    ]
    assert len(flags) > 5
    for flag in flags:
        name = flag.removeprefix("--").replace("-", "_")
        message = f"{name}: must be 3; (or another {name}). {name}=3" if "_" in name else f"{name}: must be 3"
        assert error_of(message, monkeypatch, capsys) == f"quire: {message.replace(name, flag)}\n"


def error_of(message, monkeypatch, capsys):
    """What a command prints for a ConfigError with this message."""

    def fail(*_, **__):
        raise ConfigError(message)

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(type(app), "__call__", fail)
        main()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ("the memory is short; a seed must be 3", "the memory is short; a seed must be 3"),
        (
            "/a/max_num_seqs/b cannot be read, nor a.max_num_seqs",
            "/a/max_num_seqs/b cannot be read, nor a.max_num_seqs",
        ),
        ("do not set --max-num-seqs or my_max_num_seqs", "do not set --max-num-seqs or my_max_num_seqs"),
        ("num_prompt_tokens is no option", "num_prompt_tokens is no option"),
    ],
)
def test_other_words_of_an_error_stay(message, expected, monkeypatch, capsys):
    assert error_of(message, monkeypatch, capsys) == f"quire: {expected}\n"


def test_an_error_of_options_that_contradict_each_other_names_flags(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        monkeypatch.setattr(
            "sys.argv", ["quire", "serve", "--port", "0", "--max-num-seqs", "9", "--max-num-batched-tokens", "3"]
        )
        main()
    assert "--max-num-batched-tokens (3) must be at least --max-num-seqs (9)" in capsys.readouterr().err


def test_a_model_that_does_not_exist_is_the_only_thing_that_serve_says(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["quire", "serve", "./nowhere", "--port", "0"])
    with pytest.raises(SystemExit):
        main()
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err.startswith("quire: there is no folder or .gguf file './nowhere'")
