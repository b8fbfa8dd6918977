"""Methods by which `select` decides between choices, given the logprobs of their tokens.

Methods have SGLang's signature, so that one written for SGLang can be used unchanged.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TokenLogprob = tuple[float | None, int, str | None]  # logprob, token id, text


@dataclass
class ChoicesDecision:
    """The selected choice, with the figures of the decision."""

    decision: str
    meta_info: dict[str, Any] = field(default_factory=dict)


class ChoicesSamplingMethod(ABC):
    """Base class of the methods."""

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """Whether it needs the logprobs of the choices' tokens without the prompt, too."""
        return False

    @abstractmethod
    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """The decision. Lists have one entry per choice: its mean logprob; its tokens; none; its tokens alone."""


class TokenLengthNormalized(ChoicesSamplingMethod):
    """The highest mean logprob per token; of equals, the first."""

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """See ChoicesSamplingMethod."""
        about = _meta_info(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[_argmax(normalized_prompt_logprobs)], about)


class GreedyTokenSelection(ChoicesSamplingMethod):
    """Keeps, token by token, the choices whose token at this index has the highest logprob; of several, the first.

    Beyond its end, a choice has its mean logprob. This makes it comparable with longer choices that begin with it.
    """

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """See ChoicesSamplingMethod."""
        rows = [present_logprobs(entries) for entries in input_token_logprobs]
        length = max(map(len, rows))
        matrix = [row + [mean(row)] * (length - len(row)) for row in rows]
        left = list(range(len(choices)))
        for place in range(length):
            most = max(matrix[i][place] for i in left)
            left = [i for i in left if matrix[i][place] == most]
        about = _meta_info(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        return ChoicesDecision(choices[left[0]], {**about, "greedy_logprob_matrix": matrix})


class UnconditionalLikelihoodNormalized(ChoicesSamplingMethod):
    """The highest mean of each token's logprob after the prompt minus its logprob without the prompt.

    The first token has no logprob without the prompt; 0 is subtracted.
    """

    @property
    def requires_unconditional_logprobs(self) -> bool:
        """True."""
        return True

    def __call__(
        self,
        *,
        choices: list[str],
        normalized_prompt_logprobs: list[float],
        input_token_logprobs: list[list[TokenLogprob]],
        output_token_logprobs: list[list[TokenLogprob]],
        unconditional_token_logprobs: list[list[TokenLogprob]] | None = None,
    ) -> ChoicesDecision:
        """See ChoicesSamplingMethod."""
        if unconditional_token_logprobs is None:
            raise ValueError("this method needs unconditional_token_logprobs, the logprobs of the choices alone")
        gains = [
            mean([(own[0] or 0.0) - (alone[0] or 0.0) for own, alone in zip(entries, by_itself, strict=True)])
            for entries, by_itself in zip(input_token_logprobs, unconditional_token_logprobs, strict=True)
        ]
        about = _meta_info(normalized_prompt_logprobs, input_token_logprobs, output_token_logprobs)
        about["unconditional_token_logprobs"] = unconditional_token_logprobs
        about["normalized_unconditional_prompt_logprobs"] = gains
        return ChoicesDecision(choices[_argmax(gains)], about)


token_length_normalized = TokenLengthNormalized()
greedy_token_selection = GreedyTokenSelection()
unconditional_likelihood_normalized = UnconditionalLikelihoodNormalized()


def decide(
    choices: Sequence[str],
    method: ChoicesSamplingMethod,
    scores: list[list[TokenLogprob]],
    unconditional: list[list[TokenLogprob]] | None = None,
) -> ChoicesDecision:
    """Apply the method. scores: each choice's tokens after the prompt. unconditional: the same without the prompt."""
    return method(
        choices=list(choices),
        normalized_prompt_logprobs=[mean(present_logprobs(entries)) for entries in scores],
        input_token_logprobs=scores,
        output_token_logprobs=[[] for _ in choices],
        unconditional_token_logprobs=unconditional,
    )


def common_prefix_len(one: Sequence[object], other: Sequence[object]) -> int:
    """Length of the common prefix.

    Of the tokens of a prompt and of the prompt with a choice, the tokens after it belong to the choice. They include
    the prompt's last token if the choice changes it.
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def present_logprobs(entries: Sequence[TokenLogprob]) -> list[float]:
    """The logprobs that are not None. The first token of a text has none."""
    return [entry[0] for entry in entries if entry[0] is not None]


def mean(values: Sequence[float]) -> float:
    """The mean; 0 for an empty sequence."""
    return math.fsum(values) / len(values) if values else 0.0


def _argmax(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _meta_info(
    normalized: list[float], tokens: list[list[TokenLogprob]], outputs: list[list[TokenLogprob]]
) -> dict[str, Any]:
    return {
        "normalized_prompt_logprobs": normalized,
        "input_token_logprobs": tokens,
        "output_token_logprobs": outputs,
    }
