"""Sources of drafters, one of each kind for all sequences of an engine. SOURCES has them by name."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol
from weakref import WeakValueDictionary

import msgspec

from quire.config import DrafterName
from quire.core.request import Namespace, Request
from quire.speculation.answers import AnswerStore
from quire.speculation.drafters import AnswersDrafter, Drafter, PredictionDrafter, PredictionIndex, SuffixDrafter


class DrafterSource(Protocol):
    """Makes the drafters of one kind. A source that keeps nothing has `begin` alone."""

    def begin(self, request: Request, tokens: list[int], num_prompt_tokens: int) -> Drafter | None:
        """The drafter of a sequence that begins to decode; None if it has nothing to draft from.

        tokens: those of the sequence, a list that grows with it.
        """

    def ended(self, request: Request, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Learn from a sequence that has ended."""

    def clear(self) -> None:
        """Forget all that ended sequences have left."""


class PredictionSource(DrafterSource):
    """Drafters from the prediction of a request, which its sequences share."""

    def __init__(self) -> None:
        self._indexes: WeakValueDictionary[str, PredictionIndex] = WeakValueDictionary()  # by request id

    def begin(self, request: Request, tokens: list[int], num_prompt_tokens: int) -> Drafter | None:
        if not request.prediction:
            return None
        index = self._indexes.get(request.id)
        if index is None:
            index = self._indexes[request.id] = PredictionIndex(request.prediction)
        return PredictionDrafter(index, tokens, num_prompt_tokens)


class AnswersSource(DrafterSource):
    """Drafters from the answers of ended sequences."""

    def __init__(self) -> None:
        self._store = AnswerStore()

    def begin(self, request: Request, tokens: list[int], num_prompt_tokens: int) -> Drafter:
        return AnswersDrafter(self._store, _namespace_of(request), tokens, num_prompt_tokens)

    def ended(self, request: Request, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        self._store.add(_namespace_of(request), tokens, num_prompt_tokens)

    def clear(self) -> None:
        self._store.clear()


def _namespace_of(request: Request) -> Namespace:
    """The namespace of the answers to a request, which is the same wherever its adapter starts."""
    return msgspec.structs.replace(request.namespace, adapter_start=0)


class SuffixSource(DrafterSource):
    """Drafters from the sequence itself."""

    def begin(self, request: Request, tokens: list[int], num_prompt_tokens: int) -> Drafter:
        del request, num_prompt_tokens
        return SuffixDrafter(tokens)


# In this order they propose. Of equally long proposals the first is verified.
SOURCES: Mapping[DrafterName, Callable[[], DrafterSource]] = MappingProxyType(
    {"prediction": PredictionSource, "answers": AnswersSource, "suffix": SuffixSource}
)
