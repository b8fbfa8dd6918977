"""Panics of the tokenizers library, which are no Exception of Python, as errors of quire."""

from types import TracebackType

import tokenizers

from quire.errors import ModelError


class NoPanics:
    """Context manager: a panic of the library becomes a ModelError that names the part of the tokenizer.

    A panic is a fault of the library that the model's files or a text trigger. Its class cannot be imported.
    part: a field of tokenizer.json.
    """

    def __init__(self, part: str) -> None:
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and is_panic(error):
            raise panicked(self._part, error) from error


def panicked(part: str, error: BaseException) -> ModelError:
    """The error for a part that panicked."""
    return ModelError(f"the tokenizer's {part} failed: {error!s:.200}; correct {part} in tokenizer.json")


def encode(core: tokenizers.Tokenizer, text: str | tuple[str, str], *, add_special_tokens: bool = True) -> list[int]:
    """The token ids of a text or of a pair. Raises ModelError if a part of the tokenizer panics."""
    try:
        # encode_batch_fast computes no offsets, which take half of the time.
        return list(core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise panicked(_failing_part(core, text if isinstance(text, str) else "".join(text)), error) from error


def _failing_part(core: tokenizers.Tokenizer, text: str) -> str:
    """The part that panics with this text: the parts run alone."""
    part = "normalizer"
    try:
        if core.normalizer is not None:
            text = core.normalizer.normalize_str(text)
        part = "pre_tokenizer"
        if core.pre_tokenizer is not None:
            core.pre_tokenizer.pre_tokenize_str(text)
    except BaseException as error:
        if not is_panic(error):
            raise
        return part
    return "model or post_processor"


def is_panic(error: BaseException) -> bool:
    """Whether it is a panic of a library in Rust."""
    return type(error).__name__ == "PanicException"
