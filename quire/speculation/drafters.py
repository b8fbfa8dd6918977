"""Drafters of one sequence. Each proposes the tokens that may follow, from tokens alone."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from quire.core.common_prefix import common_prefix_len
from quire.core.request import Namespace
from quire.speculation.answers import AnswerStore, prompt_key
from quire.speculation.suffix_index import MAX_INDEXED, SuffixIndex


class Proposal(NamedTuple):
    """A chain of draft tokens."""

    drafter: str  # its name
    tokens: Sequence[int]
    match_length: int  # tokens before the chain that equal those before its source
    forced: Sequence[int] = ()  # indices of tokens that the constraint forces if those before them are right


class Drafter(Protocol):
    """Proposes drafts for one sequence. One without an index has `propose` alone."""

    __slots__ = ()

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens that may follow the known ones; None without any."""

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens. Returns their number."""
        del most
        return 0

    def close(self) -> int:
        """Release the index, at the end of the sequence. Returns how many indexed tokens that frees."""
        return 0


class RunnerDrafter(Drafter):
    """Proposes what the runner proposed with the result of a step, such as a draft model on its device."""

    __slots__ = ("_length", "_proposed", "_tokens")

    def __init__(self, tokens: Sequence[int]) -> None:
        """tokens: those of the sequence, a list that grows with it."""
        self._tokens = tokens
        self._proposed: Sequence[int] = ()
        self._length = 0

    def receive(self, tokens: Sequence[int]) -> None:
        """Take the tokens that the runner proposes to follow the known ones."""
        self._proposed, self._length = tokens, len(self._tokens)

    def propose(self, most: int) -> Proposal | None:
        """The rest of them, if the tokens since then are those that were proposed."""
        number = len(self._tokens) - self._length
        if number >= len(self._proposed) or list(self._proposed[:number]) != list(self._tokens[self._length :]):
            self._proposed = ()
            return None
        return Proposal("runner", self._proposed[number : number + most], 0)


class _Follower:
    """Follows the new tokens of a sequence through a text that they may repeat."""

    __slots__ = ("behind", "match_length", "num_seen", "position", "text")

    def __init__(self, num_seen: int) -> None:
        """num_seen: leading tokens of the sequence that are not compared."""
        self.num_seen = num_seen
        self.text: Sequence[int] = ()
        self.position: int | None = None  # of the next token in the text; None if they do not agree
        self.match_length = 0  # tokens before it that agree
        self.behind = 0  # of the next token, if the last difference was an exchanged token

    def start(self, text: Sequence[int], position: int, match_length: int) -> None:
        """Follow the tokens from a position of a text on."""
        self.text, self.position, self.match_length = text, position, match_length

    def follow(self, tokens: Sequence[int]) -> bool:
        """Compare the tokens that were appended. Returns whether the sequence still agrees with the text."""
        if self.position is not None and self.num_seen < len(tokens):
            new = tokens[self.num_seen :]
            number = common_prefix_len(new, self.text[self.position : self.position + len(new)])
            self.match_length += number
            self.behind = self.position + len(new)
            self.position = self.position + number if number == len(new) else None
        self.num_seen = len(tokens)
        return self.position is not None


_FOLLOWED = 8  # tokens of a match that is followed without a search for a longer one
_NOT_INDEXED = 1024  # last tokens that are indexed once such a match ends


class SuffixDrafter(Drafter):
    """Proposes what followed the longest earlier occurrence of the last tokens in the sequence itself."""

    __slots__ = ("_follower", "_index", "_tokens")

    def __init__(self, tokens: list[int]) -> None:
        """tokens: those of the sequence, a list that grows with it."""
        self._tokens = tokens
        self._index = SuffixIndex(tokens, max(0, len(tokens) - MAX_INDEXED // 2))
        self._follower = _Follower(len(tokens))

    def close(self) -> int:
        return self._index.num_indexed

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens. Returns their number.

        While a match is followed no occurrence is searched, and the last tokens are not indexed yet.
        """
        return self._index.extend(len(self._tokens) - 1 - _NOT_INDEXED * self._follows_match(), most)

    def _follows_match(self) -> bool:
        """Whether the last tokens follow an earlier occurrence that is long enough."""
        return self._follower.follow(self._tokens) and self._follower.match_length >= _FOLLOWED

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens; None if the last two tokens have not occurred before.

        If the occurrence overlaps the end, the text repeats itself, and so does the chain.
        """
        follower, tokens, length = self._follower, self._tokens, len(self._tokens)
        if not self._follows_match():
            found = self._index.find(tokens, length, prefer_latest=False)  # texts repeat what they said first
            if found is None:
                return None
            follower.start(tokens, *found)
        assert follower.position is not None, "it follows an earlier occurrence"
        chain = tokens[follower.position : follower.position + most]
        if len(chain) < most:
            period = length - follower.position
            chain = [chain[i % period] for i in range(most)]
        return Proposal("suffix", chain, follower.match_length)


_NEAREST = 4  # places of the last two tokens on either side of the expected one that are compared
_LONGEST = 32  # tokens that are compared
_TRIED = 8  # tokens of the output before another place is searched; the same wrong one could be found again and again


class PredictionIndex:
    """Where each pair of neighbours is in the prediction of a request; for all sequences of the request."""

    __slots__ = ("__weakref__", "_places", "num_indexed", "num_users", "prediction")

    def __init__(self, prediction: Sequence[int]) -> None:
        self.prediction = prediction
        self.num_indexed = 0  # leading tokens whose pairs are indexed
        self.num_users = 0  # drafters
        self._places: dict[tuple[int, int], list[int]] = {}  # positions behind each pair, rising

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens, MAX_INDEXED in all. Returns their number."""
        begin, prediction = self.num_indexed, self.prediction
        stop = min(begin + most, len(prediction), MAX_INDEXED)
        for place in range(max(begin, 1), stop):
            self._places.setdefault((prediction[place - 1], prediction[place]), []).append(place + 1)
        self.num_indexed = stop
        return stop - begin

    def near(self, first: int, second: int, expected: int) -> list[int]:
        """Positions behind this pair of tokens, a few on either side of the expected position."""
        places = self._places.get((first, second), [])
        at = bisect_left(places, expected)
        return places[max(0, at - _NEAREST) : at + _NEAREST]


class PredictionDrafter(Drafter):
    """Proposes the rest of a predicted output.

    After a difference, it takes the differing token for one that was exchanged. If the next one differs, too, it
    continues where more of the last tokens of the output are in the prediction than anywhere near.
    """

    __slots__ = ("_follower", "_may_search", "_needs_index", "_tokens", "index")

    def __init__(self, index: PredictionIndex, tokens: list[int], num_prompt_tokens: int) -> None:
        """tokens: those of the sequence, a list that grows with it. index: of the prediction of its output."""
        self.index = index
        index.num_users += 1
        self._tokens = tokens
        self._follower = _Follower(num_prompt_tokens)
        self._follower.start(index.prediction, 0, 0)
        self._needs_index = False
        self._may_search = 0  # length of the sequence from which on a place may be searched

    def extend(self, most: int) -> int:
        """Index up to `most` more tokens of the prediction, if they are searched. Returns their number."""
        return self.index.extend(most) if self._needs_index else 0

    def close(self) -> int:
        self.index.num_users -= 1
        return 0 if self.index.num_users else self.index.num_indexed

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens of the prediction; None if it does not continue the output, or has ended."""
        follower, tokens, prediction = self._follower, self._tokens, self.index.prediction
        if not follower.follow(tokens):
            found = None
            if follower.match_length < 2 and len(tokens) >= self._may_search:
                self._needs_index = True
                found = self._find(follower.behind)
            if found is not None:
                self._may_search = len(tokens) + _TRIED
            follower.start(prediction, *(found or (follower.behind, 0)))
        if follower.position is None or follower.position >= len(prediction):
            return None
        chain = prediction[follower.position : follower.position + most]
        return Proposal("prediction", chain, follower.match_length)

    def _find(self, expected: int) -> tuple[int, int] | None:
        """The place near the expected one before which the prediction has most of the last tokens, and their number.

        None if there are several, as in a text that repeats itself.
        """
        if len(self._tokens) < 2:
            return None
        near = self.index.near(self._tokens[-2], self._tokens[-1], expected)
        found = sorted(((self._num_equal(place), place) for place in near), reverse=True)[:2]
        if not found or (found[0][0] == found[-1][0] and len(found) > 1):
            return None
        length, place = found[0]
        return place, length

    def _num_equal(self, place: int) -> int:
        """How many of the last tokens of the output are before a place of the prediction."""
        tokens, prediction, number = self._tokens, self.index.prediction, 2
        most = min(_LONGEST, place, len(tokens))
        while number < most and prediction[place - 1 - number] == tokens[-1 - number]:
            number += 1
        return number


class AnswersDrafter(Drafter):
    """Proposes what followed in an earlier answer of the namespace: to the same prompt, or behind the same tokens."""

    __slots__ = ("_follower", "_namespace", "_num_prompt_tokens", "_store", "_tokens")

    def __init__(self, store: AnswerStore, namespace: Namespace, tokens: list[int], num_prompt_tokens: int) -> None:
        """tokens: those of the sequence, a list that grows with it."""
        self._store = store
        self._namespace = namespace
        self._tokens = tokens
        self._num_prompt_tokens = num_prompt_tokens
        self._follower = _Follower(num_prompt_tokens)
        key = prompt_key(tokens, num_prompt_tokens)
        for answers in store.of(namespace):
            if (place := answers.begin(key)) is not None:
                self._follower.start(*place)
                break

    def propose(self, most: int) -> Proposal | None:
        """Up to `most` tokens of an earlier answer; None if none continues the sequence."""
        follower, tokens = self._follower, self._tokens
        if not follower.follow(tokens):
            places = [found for answers in self._store.of(self._namespace) if (found := answers.find(tokens))]
            if not places:
                return None
            follower.start(*max(places, key=lambda place: place.length))
        assert follower.position is not None, "it follows an answer"
        chain = follower.text[follower.position : follower.position + most]
        if -1 in chain:
            chain = chain[: chain.index(-1)]
        return Proposal("answers", chain, follower.match_length) if chain else None
