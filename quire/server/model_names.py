"""The names under which requests may name the served model."""

from collections.abc import Sequence

TAG = ":latest"  # that Ollama's clients add to the name of a model
CLAUDE = "claude-*"  # the names of Anthropic's models, which Claude Code has built in
# names that Hugging Face's InferenceClient sends where its user named no model
_PLACEHOLDERS = ("tgi", "dummy")


class ModelNames:
    """The served model's names: of --served-model-name, some of which may be patterns, or the model's own.

    A `*` in a pattern stands for any characters.
    """

    def __init__(self, names: Sequence[str], own: str) -> None:
        """names: without any that is no pattern, `own` is the reported one."""
        self.exact = tuple(dict.fromkeys(name for name in names if not is_pattern(name))) or (own,)
        self._patterns = tuple(name for name in names if is_pattern(name))

    @property
    def reported(self) -> str:
        """The name in responses and metrics."""
        return self.exact[0]

    def has(self, name: str) -> bool:
        """Whether this is one of the names, without a pattern."""
        return name in self.exact

    def matches(self, name: str) -> bool:
        """Whether a pattern of the options has the name."""
        return any(_matches(pattern, name) for pattern in self._patterns)

    @property
    def shown(self) -> str:
        """The names and patterns, for errors."""
        return " and ".join(map(repr, (*self.exact, *self._patterns)))


def is_pattern(name: str) -> bool:
    """Whether a name of the options stands for several."""
    return "*" in name


def is_placeholder(name: str, builtin: Sequence[str] = ()) -> bool:
    """Whether a client sends this name where its user named no model. builtin: patterns of names that it has."""
    return name in _PLACEHOLDERS or any(_matches(pattern, name) for pattern in builtin)


def _matches(pattern: str, name: str) -> bool:
    """Linear in the lengths for each part between two stars: each is looked for behind the last one found."""
    first, *parts = pattern.split("*")
    if not parts:
        return pattern == name
    last = parts.pop()
    if len(name) < len(first) + len(last) or not (name.startswith(first) and name.endswith(last)):
        return False
    place, end = len(first), len(name) - len(last)
    for part in parts:
        place = name.find(part, place, end)
        if place < 0:
            return False
        place += len(part)
    return True
