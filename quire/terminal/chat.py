"""`quire chat`: a conversation with a model in the terminal."""

import json
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status

from quire.chat.parts import CallArguments, CallBegin, Content, Part, Reasoning, message_of
from quire.chat.tools import toolbox
from quire.control_characters import visible, visible_line
from quire.core.prompt_progress import PromptProgress
from quire.errors import RequestError
from quire.params import LoRARequest, SamplingParams, StructuredOutputsParams
from quire.terminal.input import TurnReader
from quire.terminal.wrap import WordWrap

MAX_FILE = 2**20  # bytes of a file with tools or a schema


class ChatModel(Protocol):
    """What a chat needs of `quire.LLM`, which takes seconds to import."""

    model_name: str
    max_model_len: int

    def stream_message(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        on_step: Callable[[PromptProgress], None],
        lora_request: LoRARequest | None = None,
    ) -> Generator[tuple[list[Part], int]]:
        """See LLM.stream_message."""


class Chat:
    """One conversation: its messages, and what the user has set.

    console: where answers go. ask: reads a line of the user after a prompt, None to cancel; for results of tools.
    lora_request: the adapter.
    """

    def __init__(
        self,
        llm: ChatModel,
        params: SamplingParams,
        system: str | None,
        console: Console,
        ask: Callable[[str], str | None],
        lora_request: LoRARequest | None = None,
    ) -> None:
        self._llm = llm
        self._lora_request = lora_request
        self._params = params
        self._system = system
        self._console = console
        self._ask = ask
        self._messages: list[dict[str, Any]] = []
        self._tools: list[Mapping[str, object]] = []
        self._constraint: StructuredOutputsParams | None = None

    def turn(self, text: str) -> bool:
        """Answer a message or obey a command. False if the user ends the chat."""
        if not text.startswith("/"):
            self._answer(text)
            return True
        name, _, argument = text.partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            self._say(f"{name} is no command; /help lists them", "red")
            return True
        try:
            return command.run(self, argument.strip())
        except RequestError as error:
            self._say(str(error), "red")
        return True

    def _answer(self, text: str) -> None:
        """Send a message, show the answer, and go on until the model asks for no more tools."""
        length = len(self._messages)
        self._messages.append({"role": "user", "content": text})
        try:
            while self._generate():
                pass
        except RequestError as error:  # such as a conversation longer than the context
            self._say(str(error), "red")
            del self._messages[length:]

    def _generate(self) -> bool:
        """Generate and show one message. Whether results of tools follow it. Raises RequestError."""
        system = [{"role": "system", "content": self._system}] if self._system else []
        params = self._params.changed(structured_outputs=self._constraint)
        shown = _Shown(self._console)
        began, first, num_tokens = time.monotonic(), None, 0
        messages = [*system, *self._messages]
        pieces = self._llm.stream_message(
            messages,
            params,
            tools=self._tools or None,
            on_step=shown.show_prompt,
            lora_request=self._lora_request,
        )
        try:
            with closing(pieces):
                for parts, count in pieces:
                    first = first or time.monotonic()
                    num_tokens += count
                    shown.show(parts)
        except KeyboardInterrupt:
            shown.show([Content(" [cut short]")])
        finally:
            shown.end()
        if first is not None:
            seconds = time.monotonic() - first
            rate = f", {(num_tokens - 1) / seconds:,.0f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
            self._say(f"{num_tokens} tokens{rate}, first after {first - began:.2f} s", "dim")
        return self._add(shown.parts)

    def _add(self, parts: Sequence[Part]) -> bool:
        """Add an answer to the conversation, with the results of its calls. Whether it has calls."""
        message = message_of(parts)
        complete = [(f"call_{i}", call) for i, call in enumerate(message.calls) if call.complete]
        calls = [
            {"id": id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for id, call in complete
        ]
        answer: dict[str, Any] = {"role": "assistant", "content": message.content}
        if message.reasoning is not None:
            answer["reasoning_content"] = message.reasoning
        self._messages.append(answer | ({"tool_calls": calls} if calls else {}))
        for id, call in complete:
            result = self._ask(f"result of {visible_line(call.name)}: ")
            self._messages.append({"role": "tool", "tool_call_id": id, "content": result or "no result"})
        return bool(calls)

    def help(self, _: str) -> bool:
        """What can be typed."""
        width = max(len(f"{name} {command.argument}") for name, command in COMMANDS.items())
        for name, command in COMMANDS.items():
            self._say(f"{f'{name} {command.argument}':<{width}}  {command.text}")
        self._say("Ctrl-C stops an answer, and clears a line.")
        self._say('A line that ends with \\, or lines between """, are one message.')
        return True

    def system(self, text: str) -> bool:
        """Set or show the system message."""
        if text:
            self._system = text
        self._say(f"system message: {self._system or 'none'}")
        return True

    def reset(self, _: str) -> bool:
        """Forget the conversation."""
        self._messages.clear()
        self._say("a new conversation begins")
        return True

    def tools(self, file: str) -> bool:
        """Let the model call tools. Raises RequestError for a file that has none."""
        if not file or file == "off":
            self._tools = []
            self._say("no tools")
            return True
        found = json_file(file)
        tools = found if isinstance(found, list) else [found]
        if not all(isinstance(tool, dict) for tool in tools):
            raise RequestError(f"{file} must have a list of tools as in OpenAI's chat API")
        box = toolbox(tools, None, None)
        self._tools = tools
        names = ", ".join(tool.name for tool in box.tools) if box is not None else "none"
        self._say(f"tools: {names}; you are asked for the results of calls")
        return True

    def json(self, argument: str) -> bool:
        """Answer in JSON. Raises RequestError for a file that is no schema."""
        if argument == "off":
            self._constraint = None
            self._say("answers are text")
            return True
        if argument:
            self._constraint = StructuredOutputsParams(json=json.dumps(json_file(argument)))
        else:
            self._constraint = StructuredOutputsParams(json_object=True)
        self._say(f"answers are JSON{f' of the schema in {argument}' if argument else ''}")
        return True

    def exit(self, _: str) -> bool:
        """End the chat."""
        return False

    def _say(self, text: str, style: str = "") -> None:
        self._console.print(visible(text), style=style, markup=False, highlight=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[Chat, str], bool]
    argument: str
    text: str


COMMANDS: Mapping[str, _Command] = {
    "/help": _Command(Chat.help, "", "this list"),
    "/system": _Command(Chat.system, "[TEXT]", "set or show the system message"),
    "/reset": _Command(Chat.reset, "", "forget the conversation"),
    "/tools": _Command(
        Chat.tools, "[FILE|off]", "let the model call the tools in a JSON file, as in OpenAI's chat API"
    ),
    "/json": _Command(Chat.json, "[FILE|off]", "answers are JSON, of the schema in a file if it is given"),
    "/exit": _Command(Chat.exit, "", "end the chat; so does the end of input"),
}


class _Shown:
    """Shows the parts of a message as they come: reasoning dim, calls as name(arguments).

    On a terminal, the progress of a prompt that takes more than one step is shown before.
    """

    def __init__(self, console: Console) -> None:
        self.parts: list[Part] = []
        self._console = console
        self._style = ""
        self._status: Status | None = None
        width = get_terminal_size().columns if console.is_terminal else 10**6
        self._wrap = WordWrap(width, self._write)

    def show_prompt(self, progress: PromptProgress) -> None:
        if not progress.num_prompts or not self._console.is_terminal:
            self._end_status()
        elif self._status is None:
            self._status = self._console.status(str(progress))
            self._status.start()
        else:
            self._status.update(str(progress))

    def show(self, parts: Sequence[Part]) -> None:
        self._end_status()
        for part in parts:
            self.parts.append(part)
            match part:
                case Content(text):
                    self._push(text, "")
                case Reasoning(text):
                    self._push(text, "dim")
                case CallBegin(_, name):
                    self._wrap.end_line()
                    self._push(f"{visible_line(name)} ", "cyan")
                case CallArguments(_, text):
                    self._push(text, "cyan")

    def end(self) -> None:
        self._end_status()
        self._wrap.end_line()

    def _end_status(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def _push(self, text: str, style: str) -> None:
        if style != self._style:
            self._wrap.end_line()
            self._style = style
        self._wrap.push(visible(text))

    def _write(self, text: str) -> None:
        self._console.print(text, style=self._style, end="", markup=False, highlight=False, soft_wrap=True)


def json_file(file: str) -> Any:  # noqa: ANN401 (JSON)
    """The content of a JSON file. Raises RequestError."""
    try:
        with Path(file).expanduser().open("rb") as opened:
            data = opened.read(MAX_FILE + 1)
    except OSError as error:
        raise RequestError(f"{file} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE:
        raise RequestError(f"{file} is larger than {MAX_FILE:,} bytes")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{file} is no JSON: {error}") from error


def converse(
    llm: ChatModel,
    params: SamplingParams,
    system: str | None,
    console: Console,
    adapter: Path | None = None,
) -> None:
    """Chat until the user ends it. adapter: the folder of a LoRA adapter."""
    reader = TurnReader()
    lora_request = None if adapter is None else LoRARequest(adapter.name or "adapter", lora_path=adapter)
    ask = partial(reader.read, can_cancel=True)
    chat = Chat(llm, params, system, console, ask, lora_request)
    name, length = llm.model_name, llm.max_model_len
    context = f", context of {length:,} tokens" if length else ""
    said = f"{visible_line(name)}{context}. /help lists commands, /exit ends the chat."
    console.print(said, markup=False, highlight=False)
    try:
        while (text := reader.read()) is not None and chat.turn(text):
            pass
    finally:
        reader.close()
