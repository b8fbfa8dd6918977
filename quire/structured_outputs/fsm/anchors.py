"""Anchors of a pattern that has to match as a whole: at its ends they say nothing, elsewhere they are refused."""

from quire.structured_outputs.fsm.nodes import EMPTY, Anchor, Chain, Choice, Node, Repeat, chain, choice
from quire.structured_outputs.fsm.reading import Reader


def without_anchors(node: Node, reader: Reader, *, first: bool = True, last: bool = True) -> Node:
    """The same language. first, last: nothing stands before, behind the node. Raises RequestError."""
    match node:
        case Anchor():
            if not (last if node.is_end else first):
                what = (
                    "an end ($) that is not at its end" if node.is_end else "a beginning (^) that is not at its start"
                )
                raise reader.unsupported(what, node.at)
            return EMPTY
        case Chain(parts):
            solid = [i for i, part in enumerate(parts) if not isinstance(part, Anchor)]
            start, stop = (solid[0], solid[-1]) if solid else (len(parts), -1)
            return chain(
                without_anchors(part, reader, first=first and i <= start, last=last and i >= stop)
                for i, part in enumerate(parts)
            )
        case Choice(options):
            return choice(without_anchors(option, reader, first=first, last=last) for option in options)
        case Repeat(inner, least, most):
            once = most == 1
            return Repeat(without_anchors(inner, reader, first=first and once, last=last and once), least, most)
    return node
