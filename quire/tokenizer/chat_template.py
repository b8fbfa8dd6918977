"""Chat template: a conversation as the text a model was trained on. Knows Jinja, not tokens.

Templates come from the model's folder, never from a request. They run in a metered sandbox: one that
loops, grows or reaches for what it should not have ends in an error.
"""

import threading
from collections.abc import Mapping

from jinja2 import Template, TemplateError
from jinja2.exceptions import SecurityError

from quire.errors import ModelError, RequestError
from quire.tokenizer.chat_sandbox import Sandbox
from quire.tokenizer.template_meter import MAX_SECONDS, MAX_SIZE, Meter, TooMuch

MAX_SOURCE = 2**20  # characters


class ChatTemplate:
    """A compiled template. One conversation is rendered at a time, whatever thread asks.

    seconds: processor time that a rendering may take. Raises ModelError for a template that does not compile.
    """

    def __init__(self, source: str, *, seconds: float = MAX_SECONDS) -> None:
        if len(source) > MAX_SOURCE:
            raise ModelError(f"the chat template is longer than {MAX_SOURCE} characters")
        self._sandbox = Sandbox()
        self._lock = threading.Lock()
        self._seconds = seconds
        try:
            self._template: Template = self._sandbox.from_string(source)
        except (TemplateError, TooMuch, RecursionError, ValueError, TypeError) as error:
            raise ModelError(f"the model's chat template is broken: {_reason(error)}") from error

    def render(self, variables: Mapping[str, object]) -> str:
        """The text for these variables (messages, tools, add_generation_prompt, ...; plain JSON values).

        Raises RequestError when the template refuses them, and ModelError when it breaks its bounds.
        """
        with self._lock:
            self._sandbox.meter = Meter(self._seconds)
            try:
                return _collect(self._template, variables)
            except SecurityError as error:
                raise ModelError(f"the model's chat template was stopped: {_reason(error)}") from error
            except TooMuch as error:
                raise RequestError(
                    f"the chat template was stopped: {error}; shorten the messages", "messages"
                ) from error
            except RecursionError as error:
                raise RequestError("the messages are nested too deeply", "messages") from error
            except Exception as error:  # what a template can raise is not limited
                raise RequestError(
                    f"the model's chat template does not accept these messages: {_reason(error)}", "messages"
                ) from error


def _collect(template: Template, variables: Mapping[str, object]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(variables):
        size += len(piece)
        if size > MAX_SIZE:
            raise TooMuch(f"it makes more than {MAX_SIZE} characters")
        pieces.append(piece)
    return "".join(pieces)


def _reason(error: Exception) -> str:
    return f"{error}"[:500] or type(error).__name__
