"""Rendering of conversations with a model's chat templates.

Templates come from the model's files, never from a request. They run in a metered sandbox, in which too long a run, too
large a text or a forbidden access is an error.
"""

import threading
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from quire.errors import ModelError, RequestError, nearest
from quire.tokenizer.chat_costs import MAX_SECONDS, MAX_SIZE, LimitExceeded, Meter
from quire.tokenizer.chat_sandbox import Sandbox
from quire.tokenizer.messages import (
    REASONING_FIELDS,
    Message,
    NoContent,
    joined_reasoning,
    plain_json,
    plain_messages,
)
from quire.weights.json_file import read_json_object

MAX_SOURCE = 2**20  # characters


class ChatTemplate:
    """A compiled template. Thread-safe; it renders one conversation at a time.

    seconds: processor time that a rendering may take. Raises ModelError for a template that does not compile.
    """

    def __init__(self, source: str, *, seconds: float = MAX_SECONDS) -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(f"the chat template is longer than {MAX_SOURCE} characters")
        self._sandbox = Sandbox()
        self._lock = threading.Lock()
        self._seconds = seconds
        self._reads_parts: dict[str, bool] = {}  # by role
        self._refuses_three: bool | None = None
        self._reasons_by_default: dict[str, bool] = {}  # by the name of the variable
        try:
            self._template: Template = self._sandbox.from_string(source)
        except Exception as error:  # also a SyntaxError of Python, such as for 21 loops inside each other
            raise ModelError(f"the model's chat template is invalid: {_reason(error)}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text for these variables (messages, tools, add_generation_prompt, ...; plain JSON values).

        Raises RequestError if the template refuses them or exceeds a limit, ModelError for a forbidden access.
        """
        with self._lock:
            self._sandbox.meter = Meter(self._seconds)
            try:
                return _collect(self._template, variables)
            except SecurityError as error:
                raise ModelError(f"the model's chat template was stopped: {_reason(error)}") from error
            except LimitExceeded as error:
                raise RequestError(
                    f"the chat template was stopped: {error}; shorten the messages", "messages"
                ) from error
            except RecursionError as error:
                raise RequestError("the messages are nested too deeply", "messages") from error
            except Exception as error:  # a template can raise any exception
                raise RequestError(
                    f"the model's chat template does not accept these messages: {_reason(error)}", "messages"
                ) from error

    def reads_parts(self, role: str) -> bool:
        """Whether the template writes the texts of a list of text parts, for messages of this role.

        Found by a rendering with two parts. A template that expects text fails, drops a part or writes the list itself.
        The result is kept for all requests, so it depends on no variable of one.
        """
        known = self._reads_parts.get(role)
        if known is None:
            parts = [{"type": "text", "text": mark} for mark in _PART_MARKS]
            probe = {"role": role, "content": parts}
            messages = [probe] if role == "user" else [{"role": "user", "content": "a"}, probe]
            messages = [probe, messages[0]] if role == "system" else messages
            try:
                text = self.render({**_PROBE_VARIABLES, "messages": messages})
            except (RequestError, ModelError):
                text = ""
            found = text.find(_PART_MARKS[0]), text.find(_PART_MARKS[1])
            known = 0 <= found[0] < found[1] and "type" not in text[found[0] : found[1]]
            if len(self._reads_parts) < _MAX_ROLES:
                self._reads_parts[role] = known
        return known

    @property
    def refuses_content_beside_reasoning(self) -> bool:
        """Whether the template refuses a message with calls that has content and reasoning, as that of gpt-oss does.

        Found by renderings with both and with one of them. The result is kept.
        """
        if self._refuses_three is None:
            call = {"type": "function", "id": "a", "function": {"name": "a", "arguments": {}}}
            probe = {"role": "assistant", "content": "a", "reasoning_content": "b", "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": "a", "content": "a"}
            messages = plain_messages([{"role": "user", "content": "a"}, probe, result])
            self._refuses_three = not self._accepts(messages) and self._accepts(map(joined_reasoning, messages))
        return self._refuses_three

    def _accepts(self, messages: Iterable[Mapping[str, object]]) -> bool:
        try:
            self.render({**_PROBE_VARIABLES, "messages": list(messages)})
        except (RequestError, ModelError):
            return False
        return True

    def reasons(self, variables: Mapping[str, object]) -> bool:
        """Whether the model reasons before its answer, as far as the template's variables decide.

        A variable that is not given has its default. It is found by renderings without it and with both values.
        """
        return all(
            bool(variables[name]) if variables.get(name) is not None else self._does_by_default(name)
            for name in REASONING_SWITCHES
        )

    def _does_by_default(self, name: str) -> bool:
        if name not in self._reasons_by_default:
            about = {**_PROBE_VARIABLES, "messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}
            values: tuple[Mapping[str, object], ...] = ({}, {name: False}, {name: True})
            try:
                unset, off, on = (self.render({**about, **value}) for value in values)
                self._reasons_by_default[name] = not (unset == off != on)
            except (RequestError, ModelError):
                self._reasons_by_default[name] = True
        return self._reasons_by_default[name]


REASONING_SWITCHES = ("enable_thinking", "thinking")  # variables with which templates switch reasoning on and off
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_PROBE_VARIABLES = {**dict.fromkeys(_SPECIAL_TOKENS, ""), "tools": None, "documents": None}
_MAX_ROLES = 64  # for which is kept whether the template reads parts
_PART_MARKS = ("\U000f5ece", "\U000f5ecf")  # private-use characters


def _collect(template: Template, variables: Mapping[str, object]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_SIZE:
            raise LimitExceeded(f"its text has more than {MAX_SIZE} characters")
        pieces.append(piece)
    return "".join(pieces)


def _reason(error: Exception) -> str:
    """What is wrong, after the line of the template if the template does not say it itself."""
    if isinstance(error, TemplateSyntaxError):
        return f"line {error.lineno}: {error.message}"[:500]
    said = f"{error}"[:500] or type(error).__name__
    if type(error) is TemplateError:  # of raise_exception
        return said
    frames = traceback.extract_tb(error.__traceback__)
    line = next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)
    return said if line is None else f"line {line}: {said}"


DEFAULT = "default"
TOOL_USE = "tool_use"


def read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a folder, name -> Jinja source; "default" is for ordinary conversations. Raises ModelError.

    config: the contents of tokenizer_config.json.
    """
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    found = {name: _read(path) for name, path in files.items()}
    if DEFAULT not in found:
        found = {**_named(config.get("chat_template"), "tokenizer_config.json"), **found}
    older = folder / "chat_template.json"
    if not found and older.is_file():
        return _named(read_json_object(older).get("chat_template"), older.name)
    return found


def _named(templates: object, file: str) -> dict[str, str]:
    """Name -> source from a value of `chat_template`: empty, a source, or a list or object of named sources."""
    if not templates:
        return {}
    if isinstance(templates, str):
        return {DEFAULT: templates}
    pairs: list[tuple[object, object]] = []
    if isinstance(templates, Mapping):
        pairs = list(templates.items())
    elif isinstance(templates, list) and all(isinstance(entry, Mapping) for entry in templates):
        pairs = [(entry.get("name"), entry.get("template")) for entry in templates]
    named = {name: source for name, source in pairs if isinstance(name, str) and isinstance(source, str)}
    if named and len(named) == len(pairs):
        return named
    raise ModelError(f"chat_template in {file} must be a string or a list of named ones")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not UTF-8 text, or cannot be read; download it again") from error


_MARK = "\U000f5ecd"  # a private-use character, which conversations do not have and templates do not change
_PARAM = "continue_final_message"


class ContinuedFinalMessage:
    """A conversation whose last message is continued, with a mark at the end of its text.

    field: the continued text of the message, such as "content" or "reasoning_content".
    Raises RequestError if the message has no such text.
    """

    def __init__(self, messages: Sequence[dict[str, object]], field: str = "content") -> None:
        last = messages[-1]
        text = last.get(field)
        if not isinstance(text, str) or isinstance(text, NoContent):
            raise RequestError(f"{_PARAM} needs a last message with {field}", _PARAM)
        copies = REASONING_FIELDS if field in REASONING_FIELDS else (field,)
        marked = {name: f"{text}{_MARK} " for name in copies if last.get(name) == text}
        self.messages = [*messages[:-1], {**last, **marked}]
        self._text = text.strip()

    def truncate(self, rendered: str) -> str:
        """The text up to the mark; without trailing white space if the template stripped the space after the mark."""
        end = rendered.rfind(_MARK)
        if end < 0 or self._text not in rendered:
            raise RequestError("the model's chat template does not render the last message unchanged", _PARAM)
        trimmed = rendered[end + len(_MARK) : end + len(_MARK) + 1] != " "
        return rendered[:end].rstrip() if trimmed else rendered[:end]


class TemplateSet:
    """Compiled templates by name.

    A template that does not compile stops no model, because completions and embeddings need none. Its conversations are
    refused. sources: "default", "tool_use" or any other name -> Jinja source. errors: name -> why it does not compile.
    """

    def __init__(self, sources: Mapping[str, str]) -> None:
        self._templates: dict[str, ChatTemplate | None] = {}
        self.errors: dict[str, str] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = ChatTemplate(source)
            except ModelError as error:
                self._templates[name] = None
                self.errors[name] = str(error)

    def __bool__(self) -> bool:
        return bool(self._templates)

    def choose(self, name: str | None, *, has_tools: bool) -> ChatTemplate:
        """The template `name`; None: "tool_use" if it exists and there are tools, else "default".

        Raises RequestError if the template does not exist, or does not compile.
        """
        templates = self._templates
        if not templates:
            raise RequestError(
                "this model has no chat template; use completions with a prompt, or add chat_template.jinja "
                "to the model's folder",
                "messages",
            )
        if name is None:
            name = TOOL_USE if has_tools and TOOL_USE in templates else DEFAULT
        if not isinstance(name, str) or name not in templates:
            known = ", ".join(sorted(templates))
            raise RequestError(
                f"the model has no chat template {name!r:.80}{nearest(str(name), templates)}; it has: {known}",
                "chat_template",
            )
        template = templates[name]
        if template is None:
            raise RequestError(
                f"{self.errors[name]}; correct {_SOURCE_OF.get(name, f'the template {name!r:.80}')}, "
                "or use completions with a prompt",
                "chat_template",
            )
        return template


_SOURCE_OF = {DEFAULT: "chat_template.jinja in the model's folder, or chat_template in tokenizer_config.json"}


def render_conversation(
    template: ChatTemplate,
    messages: Sequence[Message],
    variables: Mapping[str, object],
    *,
    tools: Sequence[Mapping[str, object]] | None,
    documents: Sequence[Mapping[str, object]] | None,
    add_generation_prompt: bool | None,
    continue_final_message: bool | str,
) -> str:
    """A conversation as text. See `Tokenizer.apply_chat_template` for arguments and errors."""
    if not isinstance(continue_final_message, bool | str):
        raise RequestError("continue_final_message must be true, false or a field's name", "continue_final_message")
    if add_generation_prompt and continue_final_message:
        raise RequestError(
            "continue_final_message continues the last message, and add_generation_prompt starts a new one; "
            "set one of them to false",
            "continue_final_message",
        )
    others: dict[str, object] = {
        **{name: plain_json(value, "chat_template_kwargs") for name, value in variables.items()},
        "tools": _without_strict(_objects(tools, "tools")),
        "documents": _objects(documents, "documents"),
        "add_generation_prompt": not continue_final_message if add_generation_prompt is None else add_generation_prompt,
    }
    plain = plain_messages(messages, template.reads_parts)
    joined = list(map(joined_reasoning, plain))
    if joined != plain and template.refuses_content_beside_reasoning:
        plain = joined
    end = None
    if continue_final_message:
        plain[-1:] = plain_messages(messages[-1:])  # its text is marked, so it must be one string
        end = ContinuedFinalMessage(plain, "content" if continue_final_message is True else continue_final_message)
        plain = end.messages
    rendered = template.render({**others, "messages": plain})
    return rendered if end is None else end.truncate(rendered)


def _objects(values: Sequence[Mapping[str, object]] | None, name: str) -> object:
    """A plain copy of a list of objects; None if it is empty, because templates test for None."""
    if not values:
        return None
    if not isinstance(values, list | tuple) or not all(isinstance(value, Mapping) for value in values):
        raise RequestError(f"{name} must be a list of objects", name)
    return plain_json(list(values), name)


def _without_strict(tools: object) -> object:
    """Tools without `strict`: it concerns the server, and many clients send it with every function."""
    if not isinstance(tools, list):
        return tools
    written = []
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and "strict" in function:
            tool = {**tool, "function": {name: value for name, value in function.items() if name != "strict"}}
        written.append(tool)
    return written
