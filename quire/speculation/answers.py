"""Earlier answers of a namespace, as a source of drafts (SuffixDecoding: Oliaro et al., 2024).

Agents, evaluations and forms are answered with the same words again and again, and a repeated request with the same
answer. Answers are kept per namespace, so that no tenant is served faster because of what another one was answered.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.request import Namespace
from quire.speculation.suffix_index import SuffixIndex

_MOST_TOKENS = 16_384  # of one generation of answers; there are up to two per namespace
_MOST_OF_ALL = 2**19  # tokens of all namespaces, about 150 bytes each
_BEFORE = 32  # tokens of the prompt that are kept before its answer
_PROMPT_TAIL = 256  # last tokens of a prompt that, with its length, identify it
_END = -1  # behind each answer; no token


class Place(NamedTuple):
    """A place in earlier answers: what follows there may follow again."""

    tokens: Sequence[int]
    position: int
    length: int  # tokens before it that match


class Answers:
    """The latest answers of one namespace, oldest first."""

    __slots__ = ("_index", "_starts", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []  # the end of a prompt, its answer, _END, and so on
        self._index = SuffixIndex(self.tokens)
        self._starts: dict[int, int] = {}  # prompt -> where its latest answer begins

    def add(self, prompt: int, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Add the answer behind the first `num_prompt_tokens` of `tokens`. prompt: its `prompt_key`."""
        begin = max(0, num_prompt_tokens - _BEFORE)
        self._starts[prompt] = len(self.tokens) + num_prompt_tokens - begin
        self.tokens += tokens[begin:]
        self.tokens.append(_END)
        self._index.extend(len(self.tokens), len(self.tokens))

    def begin(self, prompt: int) -> Place | None:
        """Where the latest answer to a prompt begins, or None."""
        start = self._starts.get(prompt)
        return None if start is None else Place(self.tokens, start, _BEFORE)

    def find(self, ending: Sequence[int]) -> Place | None:
        """The longest earlier occurrence of the end of `ending`, or None."""
        found = self._index.find(ending, len(ending), prefer_latest=True)
        return None if found is None else Place(self.tokens, found.stop, found.length)


def prompt_key(prompt: Sequence[int], length: int) -> int:
    """A key of the first `length` tokens of `prompt`. Equal keys of different prompts cost a draft, no more."""
    return hash((length, *prompt[max(0, length - _PROMPT_TAIL) : length]))


class AnswerStore:
    """The answers of all namespaces. The least recently used namespace is dropped if there are too many tokens."""

    def __init__(self) -> None:
        self._answers: OrderedDict[Namespace, list[Answers]] = OrderedDict()  # one or two generations, latest first
        self._num_tokens = 0

    def of(self, namespace: Namespace) -> Sequence[Answers]:
        """The answers of a namespace, those of the latest generation first. Empty if there are none."""
        found = self._answers.get(namespace)
        if found is None:
            return ()
        self._answers.move_to_end(namespace)
        return found

    def add(self, namespace: Namespace, tokens: Sequence[int], num_prompt_tokens: int) -> None:
        """Add the answer behind the first `num_prompt_tokens` of `tokens`. An answer that is too long is left out."""
        if not num_prompt_tokens < len(tokens) <= num_prompt_tokens + _MOST_TOKENS // 2:
            return
        generations = self._answers.setdefault(namespace, [Answers()])
        self._answers.move_to_end(namespace)
        if len(generations[0].tokens) >= _MOST_TOKENS // 2:
            self._num_tokens -= sum(len(old.tokens) for old in generations[1:])
            del generations[1:]
            generations.insert(0, Answers())
        before = len(generations[0].tokens)
        generations[0].add(prompt_key(tokens, num_prompt_tokens), tokens, num_prompt_tokens)
        self._num_tokens += len(generations[0].tokens) - before
        while self._num_tokens > _MOST_OF_ALL:
            _, dropped = self._answers.popitem(last=False)
            self._num_tokens -= sum(len(old.tokens) for old in dropped)

    def clear(self) -> None:
        """Forget all answers."""
        self._answers.clear()
        self._num_tokens = 0
