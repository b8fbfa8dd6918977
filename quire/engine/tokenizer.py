"""Tokenizer: text to token ids and back, and conversations to text. Knows the model's folder, nothing of requests.

It wraps the `tokenizers` library. As in transformers 5, whether a text gets begin and end tokens is the
affair of tokenizer.json alone; of tokenizer_config.json count the special tokens and the chat template.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from quire.engine.chat_template import ChatTemplate, choose
from quire.engine.messages import Message, plain_json, plain_messages
from quire.errors import ModelError, RequestError
from quire.models.json_file import read_object

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """Text to ids and back. All methods may be called from several threads at once."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ) -> None:
        self._core = core
        self.special_tokens = dict(special_tokens or {})  # name ("eos_token") -> text
        self.special_ids = frozenset(i for i, token in core.get_added_tokens_decoder().items() if token.special)
        self.vocab_size = core.get_vocab_size()
        self._chat_template = ChatTemplate(chat_template) if chat_template else None
        self._tool_template = ChatTemplate(tool_template) if tool_template else self._chat_template
        self._bytes = _byte_level_alphabet() if isinstance(core.decoder, decoders.ByteLevel) else None

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """From tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja.

        Raises ModelError that says which file is missing or broken.
        """
        folder = Path(folder)
        core = _read_core(folder / "tokenizer.json")
        path = folder / "tokenizer_config.json"
        config = read_object(path) if path.is_file() else {}
        special = {name: _token_text(config[name]) for name in _SPECIAL_NAMES if config.get(name) is not None}
        core.no_truncation()
        core.no_padding()
        chat, tool = _read_templates(folder, config)
        return cls(core, special_tokens=special, chat_template=chat, tool_template=tool)

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a sequence, where the tokenizer names one."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a sequence, where the tokenizer names one."""
        return self._special_id("bos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 (transformers')
        """Token ids of a text. Raises RequestError where the text is not valid Unicode."""
        if not isinstance(text, str):
            raise RequestError(f"a prompt must be text, not {type(text).__name__}", "prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"the text is not valid Unicode: an unpaired surrogate at position {error.start}", "prompt"
            ) from error
        return list(self._core.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:  # noqa: FBT001, FBT002
        """The text of token ids; bytes that form no character become U+FFFD, ids without a token nothing.

        Raises RequestError for ids that no vocabulary has.
        """
        try:
            return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise RequestError("token ids must be whole numbers from 0 to 4294967295", "prompt") from error

    def token_text(self, token: int) -> str:
        """The text of one token by itself."""
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, also of one that is only a part of a character."""
        piece = self._core.id_to_token(token)
        if piece is not None and self._bytes is not None and all(char in self._bytes for char in piece):
            return bytes(self._bytes[char] for char in piece)
        if piece is not None and self._bytes is None and len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])  # SentencePiece's byte tokens, such as <0xE2>
        return self.token_text(token).encode()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,  # noqa: FBT001, FBT002 (transformers' signature)
        **variables: object,
    ) -> str:
        """A conversation as text; `variables` are the template's own switches, such as enable_thinking.

        Raises RequestError: no template, or one that does not accept these messages.
        """
        template = self._tool_template if tools else self._chat_template
        if template is None:
            raise RequestError(
                "this model has no chat template; use completions with a prompt, or add chat_template.jinja "
                "to the model's folder",
                "messages",
            )
        return template.render(
            {
                **self.special_tokens,
                **{name: plain_json(value, "chat_template_kwargs") for name, value in variables.items()},
                "messages": plain_messages(messages),
                "tools": plain_json(list(tools), "tools") if tools else None,
                "add_generation_prompt": add_generation_prompt,
            }
        )

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._core.token_to_id(text)


def _read_core(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ModelError(f"{path} is missing; quire needs the tokenizer in that format")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more special
        raise ModelError(f"{path} is broken ({error!s:.200}); download it again") from error


def _token_text(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise ModelError(f"a special token in tokenizer_config.json must be a string, not {value!r:.80}")
    return text


def _read_templates(folder: Path, config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """For conversations without and with tools; None where there is none."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8"), None
        except ValueError as error:
            raise ModelError(f"{path} is not UTF-8 text; download it again") from error
    templates = config.get("chat_template")
    try:
        return choose(templates, "default"), choose(templates, "tool_use")
    except (KeyError, TypeError) as error:
        raise ModelError("chat_template in tokenizer_config.json must be a string or a list of named ones") from error


def _byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}
