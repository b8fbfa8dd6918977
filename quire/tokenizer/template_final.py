"""A conversation whose last message is to be continued. Knows messages and text, no template.

A template closes each message, so a mark is put behind the last one, and what the template makes is cut
off at the mark. transformers does the same, and calls it continue_final_message.
"""

from collections.abc import Sequence

from quire.errors import RequestError
from quire.tokenizer.messages import REASONING_FIELDS

_MARK = "\U000f5ecd"  # for private use: no conversation has it, and templates do not change it
_PARAM = "continue_final_message"


class OpenEnd:
    """The last message of a conversation, open at its end.

    field: which text of it is continued, "content" or, for instance, "reasoning_content".
    Raises RequestError where the message has no such text.
    """

    def __init__(self, messages: Sequence[dict[str, object]], field: str = "content") -> None:
        last = messages[-1]
        text = last.get(field)
        if not isinstance(text, str):
            raise RequestError(f"{_PARAM} needs a last message with {field}", _PARAM)
        copies = REASONING_FIELDS if field in REASONING_FIELDS else (field,)
        marked = {name: f"{text}{_MARK} " for name in copies if last.get(name) == text}
        self.messages = [*messages[:-1], {**last, **marked}]
        self._text = text.strip()

    def cut(self, rendered: str) -> str:
        """The text up to the end of the last message. White space before a mark that lost its own is not kept."""
        end = rendered.rfind(_MARK)
        if end < 0 or self._text not in rendered:
            raise RequestError("the model's chat template does not show the last message as it is", _PARAM)
        trimmed = rendered[end + len(_MARK) : end + len(_MARK) + 1] != " "
        return rendered[:end].rstrip() if trimmed else rendered[:end]
