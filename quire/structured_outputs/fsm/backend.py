"""The fsm backend: patterns, choices and the regular part of JSON schema, each as the smallest automaton."""

import json

from quire.errors import RequestError
from quire.structured import StructuredOutputsParams
from quire.structured_outputs.fsm.construct import of_node, of_words, states_of
from quire.structured_outputs.fsm.dfa import Dfa
from quire.structured_outputs.fsm.json_schema import of_schema
from quire.structured_outputs.fsm.matcher import FsmGrammar
from quire.structured_outputs.fsm.nodes import Node
from quire.structured_outputs.fsm.regex import parse
from quire.structured_outputs.fsm.token_masks import TokenFsm
from quire.structured_outputs.fsm.token_trie import TokenTrie
from quire.structured_outputs.limits import ByVocabulary, checked_regex
from quire.structured_outputs.vocabulary import Vocabulary


class FsmBackend:
    """Compiles kinds regex, choice and json. Remembers the tries of the last vocabularies, nothing else."""

    def __init__(self) -> None:
        self._trie = ByVocabulary(TokenTrie)

    def check(self, asked: StructuredOutputsParams) -> None:
        """Raises RequestError for what is wrong, not regular, or too large: all that `compile` refuses."""
        if asked.kind == "choice":
            automaton(asked)
        else:
            states_of(_tree(asked), asked.kind)

    def compile(self, asked: StructuredOutputsParams, vocabulary: Vocabulary) -> FsmGrammar:
        """The automaton for this vocabulary. Raises RequestError."""
        return FsmGrammar(TokenFsm(automaton(asked), self._trie(vocabulary), vocabulary))


def automaton(asked: StructuredOutputsParams) -> Dfa:
    """The smallest automaton of what was asked. Raises RequestError."""
    if asked.kind == "choice":
        return of_words(asked.choice or ())
    return of_node(_tree(asked), asked.kind)


def _tree(asked: StructuredOutputsParams) -> Node:
    match asked.kind:
        case "regex":
            return parse(checked_regex(asked))
        case "json":
            whitespace = "" if asked.disable_any_whitespace else asked.whitespace_pattern
            return of_schema(json.loads(asked.text), whitespace)
    raise RequestError(f"the fsm backend has no {asked.kind}: use the llguidance backend", asked.kind)
