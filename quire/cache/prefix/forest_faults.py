"""What can be wrong with a node of a radix tree. Looks, and changes nothing."""

from collections.abc import Iterator

from quire.cache.block_table import ABSENT
from quire.cache.prefix.radix_node import Node


def faults(node: Node, size: int) -> Iterator[str]:
    """Complaints about a node. size: bytes of a block's key."""
    keys = [child.edge[:size] for child in node.children]
    if keys != node.children.keys or keys != sorted(set(keys)):
        yield "its children are not in order"
    if any(child.parent is not node for child in node.children):
        yield "a child has another parent"
    if len({len(blocks) for blocks in node.blocks}) != 1 or -(-len(node.edge) // size) != len(node.blocks[0]):
        yield "its tokens and blocks do not fit"
    if node.parent is None:
        if not node.children and not node.writers:
            yield "a root of nothing"
    else:
        yield from _inner_faults(node, size)
    for table in node.writers:
        if table.place is not node or table.num_indexed != node.end:
            yield f"a table of {table.num_indexed} indexed blocks does not end there"
        for group, blocks in enumerate(table.blocks):
            pairs = zip(node.path_blocks(group), blocks[node.root.end : node.end], strict=False)
            if any(ours != theirs and ABSENT not in (ours, theirs) for ours, theirs in pairs):
                yield f"a table that ends there has other blocks of group {group}"


def _inner_faults(node: Node, size: int) -> Iterator[str]:
    assert node.parent is not None, "not a root"
    if node.start != node.parent.end:
        yield "it does not begin where its parent ends"
    if len(node.edge) % size and (node.children or node.writers or len(node.blocks[0]) > 1):
        yield "something follows a tail"
    only = node.children.only
    if not node.writers and only is not None and len(only.edge) >= size:
        yield "it should be merged with its only child"
    if not node.children and not node.writers and all(blocks[-1] == ABSENT for blocks in node.blocks):
        yield "a leaf that ends without a block"
