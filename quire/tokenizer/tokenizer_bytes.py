"""The bytes that a token stands for, wherever it is. Knows the decoder of a `tokenizers` core, no sequences.

All decoders of language models have this in common: a token adds the same bytes to every text, unless it
is the first, which may lose a leading space. So a text is its tokens' bytes, one after another.
"""

import re
from typing import Literal

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # how SentencePiece writes a byte that is no piece of its own


class TokenBytes:
    """Bytes of tokens, remembered for each token that was asked for.

    errors: how `bytes.decode` has to treat what is no UTF-8, to do as the core does: "replace" puts one
    U+FFFD for the beginning of a character, "surrogateescape" makes it possible to put one for each byte.
    """

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        self._core = core
        byte_level = core.decoder is not None and core.decoder.decode(["aĠb"]) == "a b"
        self._alphabet = byte_level_alphabet() if byte_level else None
        self._inside: dict[int, bytes] = {}
        self.errors: Literal["replace", "surrogateescape"] = "replace" if byte_level else "surrogateescape"

    def inside(self, token: int) -> bytes:
        """What the token adds to a text that has begun; nothing for an id without a token."""
        known = self._inside.get(token)
        if known is not None:
            return known
        piece = self._core.id_to_token(token)
        if piece is None:
            return b""  # and not remembered: there is no end of such ids
        return self._inside.setdefault(token, self._of_piece(piece, token))

    def first(self, token: int) -> bytes:
        """What the token adds to an empty text."""
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
        return str(self._core.decode(tokens, skip_special_tokens=False))


def byte_level_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes for bytes: printable Latin-1 as itself, the rest from U+0100 on."""
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
