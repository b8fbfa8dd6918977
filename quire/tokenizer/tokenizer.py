"""The tokenizer of a model, a wrapper of the `tokenizers` library.

`hf_files` and `gguf` read its files, `chat_template` renders its chat templates.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal

import tokenizers

from quire.errors import RequestError
from quire.tokenizer.chat_template import DEFAULT, TOOL_USE, TemplateSet, read_templates, render_conversation
from quire.tokenizer.hf_files import read_tokenizer
from quire.tokenizer.messages import Message
from quire.tokenizer.panics import NoPanics, encode

_DECODING = NoPanics("decoder")
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # SentencePiece's token of a single byte


class TokenBytes:
    """The bytes of tokens, cached by token.

    errors: the `errors` argument of `bytes.decode` for invalid UTF-8 that agrees with the library. "replace" writes one
    U+FFFD for the beginning of a character. With "surrogateescape" a caller can write one for each byte.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        with _DECODING:
            byte_level = core.decoder is not None and core.decoder.decode(["aĠb"]) == "a b"
        self._alphabet = byte_level_alphabet() if byte_level else None
        self._inside: dict[int, bytes] = {}
        self.errors: Literal["replace", "surrogateescape"] = "replace" if byte_level else "surrogateescape"

    def inside(self, token: int) -> bytes:
        """The bytes that a token adds to a text that is not empty; b"" for an id without a token.

        Raises ModelError if the decoder fails.
        """
        known = self._inside.get(token)
        if known is not None:
            return known
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""  # not cached: the number of such ids has no limit
        return self._inside.setdefault(token, self._of_piece(piece, token))

    def first(self, token: int) -> bytes:
        """The bytes that a token adds to an empty text."""
        inside = self.inside(token)
        if self._alphabet is not None or not _is_text(inside):
            return inside
        return self._text([token]).encode()

    def _of_piece(self, piece: str, token: int) -> bytes:
        if self._alphabet is not None:
            alphabet = self._alphabet
            return bytes(alphabet[char] for char in piece) if alphabet.keys() >= set(piece) else piece.encode()
        byte = _BYTE.fullmatch(piece)
        alone = self._text([token])
        if byte is not None and alone != piece:
            return bytes.fromhex(byte[1])
        return self._text([token, token])[len(alone) :].encode()

    def _text(self, tokens: list[int]) -> str:
        with _DECODING:
            return str(self._core.decode(tokens, skip_special_tokens=False))


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte in byte-level BPE: printable Latin-1 as itself, other bytes from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_text(text: object) -> None:
    """Raises RequestError unless it is a text of valid Unicode."""
    if not isinstance(text, str):
        raise RequestError(f"a prompt must be text, not {type(text).__name__}", "prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: an unpaired surrogate at position {error.start}", "prompt"
        ) from error


_BAD_ID = "token ids must be whole numbers from 0 to 4294967295"


class Tokenizer:
    """Text to token ids and back, and conversations to text. Thread-safe.

    special_tokens: name ("eos_token") -> text. chat_template: a Jinja source, or several by name ("default",
    "tool_use", ...). Conversations with a template that does not compile are refused.
    """

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        self._core = core
        self._bytes = TokenBytes(core)
        self.special_tokens = dict(special_tokens or {})  # name ("eos_token") -> text
        self.added_ids = frozenset(core.get_added_tokens_decoder())
        self.special_ids = frozenset(i for i in self.added_ids if self._is_skipped(i))
        self.special_texts = frozenset(self.token_text(token) for token in self.special_ids)
        self.vocab_size = core.get_vocab_size()  # number of tokens; if ids have holes, the largest id can exceed it
        sources = {DEFAULT: chat_template} if isinstance(chat_template, str) else chat_template or {}
        self.chat_templates = dict(sources)  # name -> Jinja source
        self._templates = TemplateSet(sources)

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """The tokenizer of a folder with tokenizer.json, or with vocab.json and merges.txt.

        Raises ModelError that says which file is missing or broken.
        """
        folder = Path(folder)
        files = read_tokenizer(folder)
        templates = read_templates(folder, files.config)
        return cls(files.core, special_tokens=files.special_tokens, chat_template=templates)

    @property
    def has_chat_template(self) -> bool:
        """Whether the model has a chat template."""
        return bool(self._templates)

    @property
    def template_errors(self) -> Mapping[str, str]:
        """Name -> why a chat template does not compile."""
        return self._templates.errors

    @property
    def tool_template(self) -> str | None:
        """The Jinja source that renders conversations with tools; None without a chat template."""
        return self.chat_templates.get(TOOL_USE, self.chat_templates.get(DEFAULT))

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a sequence; None if the tokenizer names none."""
        return self._special_id("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a sequence; None if the tokenizer names none."""
        return self._special_id("bos_token")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:  # noqa: FBT001, FBT002 (transformers')
        """The token ids of a text.

        Raises RequestError if the text is not valid Unicode, ModelError if a part of the tokenizer fails.
        """
        _check_text(text)
        return encode(self._core, text, add_special_tokens=add_special_tokens)

    def encode_with_places(self, text: str) -> list[tuple[int, int, int]]:
        """The token ids of a text, each with its begin and end in the text, in characters."""
        _check_text(text)
        with NoPanics("model or post_processor"):
            found = self._core.encode(text)
        return [(id, *place) for id, place in zip(found.ids, found.offsets, strict=True)]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """The token ids of two texts as one prompt, joined as the tokenizer joins pairs. Raises as `encode`."""
        _check_text(first)
        _check_text(second)
        return encode(self._core, (first, second))

    def begin_and_end_ids(self) -> tuple[list[int], list[int]]:
        """The ids that the tokenizer puts before and after every text."""
        text = "a"
        whole, inner = self.encode(text), self.encode(text, add_special_tokens=False)
        for begin in range(len(whole) - len(inner) + 1):
            if whole[begin : begin + len(inner)] == inner:
                return whole[:begin], whole[begin + len(inner) :]
        return [], []

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:  # noqa: FBT001, FBT002
        """The text of token ids. Invalid UTF-8 becomes U+FFFD; ids without a token are skipped.

        Raises RequestError for ids that are no integers from 0 to 2**32 - 1, ModelError if the decoder fails.
        """
        try:
            with _DECODING:
                return str(self._core.decode(ids, skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise RequestError(_BAD_ID, "prompt") from error

    def token_bytes(self, token: int, *, first: bool = False) -> bytes:
        """The bytes that one token adds to a text; they can be a part of a character.

        first: at the beginning of the text, where some tokenizers drop a leading space.
        """
        return self._bytes.first(token) if first else self._bytes.inside(token)

    @property
    def byte_errors(self) -> Literal["replace", "surrogateescape"]:
        """How invalid UTF-8 is decoded, as in `TokenBytes`.

        "replace": one U+FFFD for each beginning of a character; "surrogateescape": one for each byte.
        """
        return self._bytes.errors

    def token_text(self, token: int) -> str:
        """The text that one token adds to a text; a part of a character is U+FFFD."""
        return self.token_bytes(token).decode(errors="replace")

    def convert_ids_to_tokens(
        self,
        ids: int | Sequence[int],
        skip_special_tokens: bool = False,  # noqa: FBT001, FBT002 (transformers' signature)
    ) -> str | list[str | None] | None:
        """Tokens as in the vocabulary, such as `Ġhello` or `▁hello`; None for an id without a token."""
        if isinstance(ids, int):
            return self._piece(ids)
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return [self._piece(token) for token in ids if token not in skipped]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Ids of tokens as in the vocabulary; the id of unk_token, or None, for an unknown token."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def apply_chat_template(
        self,
        /,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool | None = None,  # noqa: FBT001 (transformers' signature)
        *,
        continue_final_message: bool | str = False,
        documents: Sequence[Mapping[str, object]] | None = None,
        chat_template: str | None = None,
        **variables: object,
    ) -> str:
        """A conversation as text. variables: the template's own variables, such as enable_thinking.

        add_generation_prompt: append the beginning of an answer; None: unless the last message is continued.
        continue_final_message: leave the last message open; a string names the field to continue, True is "content".
        chat_template: name of one of the model's templates; None: "tool_use" if it exists and `tools` are given, else
        "default". Raises RequestError if there is no template or it refuses the messages; ModelError if it is stopped.
        """
        return render_conversation(
            self._templates.choose(chat_template, has_tools=bool(tools)),
            messages,
            {**self.special_tokens, **variables},
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )

    def reasons(
        self, variables: Mapping[str, object], *, has_tools: bool = False, chat_template: str | None = None
    ) -> bool:
        """Whether the model reasons before its answer, as far as the variables of its chat template decide."""
        return self._templates.choose(chat_template, has_tools=has_tools).reasons(variables)

    def _is_skipped(self, token: int) -> bool:
        twice = [token, token]  # the decoder may strip the space of the first
        with _DECODING:
            return bool(self._core.decode(twice, skip_special_tokens=False)) and not self._core.decode(twice)

    def _piece(self, token: int) -> str | None:
        try:
            return self._core.id_to_token(token)
        except (OverflowError, TypeError) as error:
            raise RequestError(_BAD_ID, "prompt") from error

    def _id(self, token: str) -> int | None:
        found = self._core.token_to_id(token)
        return self._special_id("unk_token") if found is None else found

    def _special_id(self, name: str) -> int | None:
        text = self.special_tokens.get(name)
        return None if text is None else self._core.token_to_id(text)


MAX_BAD_TOKENS = 32768  # of all words in all variants; each running sequence is compared with them
_BEFORE = "\n"  # a text that tokenizers do not join with the text after it


def bad_word_tokens(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of each word at the beginning of a text, after a space, and after other text.

    These differ: a tokenizer may have a token for a word with its space, and may put a space before a whole text.
    Duplicates are removed. Raises RequestError for more than MAX_BAD_TOKENS tokens.
    """
    if not words:
        return []
    before = tokenizer.encode(_BEFORE, add_special_tokens=False)
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip() or word
        for text in (bare, f" {bare}"):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
        inside = tokenizer.encode(_BEFORE + bare, add_special_tokens=False)
        if inside[: len(before)] == before:
            sequences[tuple(inside[len(before) :])] = None
    if (count := sum(map(len, sequences))) > MAX_BAD_TOKENS:
        raise RequestError(f"bad_words have {count:,} tokens; give fewer, up to {MAX_BAD_TOKENS:,} tokens", "bad_words")
    return [list(sequence) for sequence in sequences if sequence]
