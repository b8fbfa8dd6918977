"""The radix tree: worked examples of the documents, shared blocks, eviction order, reasons of a miss, run time."""

from time import thread_time

import pytest
from held_items import num_held
from prefix_cache_model import radix_config

from quire.cache.kv_cache import KVCache
from quire.cache.prefix.index import EvictionCause
from quire.cache.prefix.radix_node import LRUNodes, Node
from quire.core.request import Namespace

NS = Namespace("tenant")
NOBODY = EvictionCause()


class Cache:
    """A KVCache in which each sequence computes all its tokens in one step."""

    def __init__(self, num_blocks: int = 100, block_size: int = 1, **options) -> None:
        self.kv = KVCache(radix_config(num_blocks, block_size, **options))
        self.num_seqs = self.num_steps = 0
        self.now = 0.0

    def admit(self, tokens, namespace=NS, *, reusable=None, record=True, cause=None):
        self.num_seqs += 1
        reusable = len(tokens) - 1 if reusable is None else reusable
        admission = self.kv.admit(
            self.num_seqs,
            list(tokens),
            namespace,
            reusable=reusable,
            limit=len(tokens),
            max_new_positions=len(tokens),
            cause=cause or EvictionCause(self.now, f"request {self.num_seqs}", namespace.tenant),
        )
        assert admission is not None
        admission.table.num_launched = admission.num_tokens
        if record:
            self.kv.cache_blocks(admission.table, admission.num_tokens, len(tokens))
        return admission

    def step(self) -> None:
        self.num_steps += 1
        self.kv.launched(self.num_steps)
        self.kv.collected(self.num_steps)
        for table in self.kv.tables.values():
            table.num_launched = len(table.tokens)
        assert self.kv.check() == []

    def release(self, seq_id: int) -> None:
        self.kv.release(seq_id, len(self.kv.tables[seq_id].tokens))
        assert self.kv.check() == []

    def run(self, tokens, namespace=NS, **options):
        admission = self.admit(tokens, namespace, **options)
        self.step()
        self.release(self.num_seqs)
        return admission

    def evict(self, count: int, cause: EvictionCause = NOBODY) -> int:
        freed = self.kv.index.evict(0, count, cause)
        assert self.kv.check() == []
        return freed

    def edges(self) -> list[list[int]]:
        nodes = [node for node in self.kv.index.trees.nodes() if node.parent is not None]
        return sorted(memoryview(node.edge).cast("q").tolist() for node in nodes)

    def matched(self, tokens, namespace=NS) -> int:
        return self.kv.index.match_prefix(namespace, list(tokens)).num_tokens


def words(cache: Cache) -> list[str]:
    return sorted("".join(map(chr, edge)) for edge in cache.edges())


def test_document_000_math_entry_3_the_walk_matches_four_tokens_and_leaves_two():
    cache = Cache()
    cache.run([10, 20, 30, 40])
    cache.run([10, 20, 50, 60])
    assert cache.edges() == [[10, 20], [30, 40], [50, 60]], "the two tokens that they share are there once"
    admission = cache.run([10, 20, 30, 40, 70, 80])
    assert (admission.num_tokens, 6 - admission.num_tokens) == (4, 2)
    assert admission.num_shared_blocks == 4


def test_document_000_algorithm_2_an_edge_is_split_and_the_older_leaf_is_evicted_first():
    cache = Cache()
    cache.run([1, 2, 3, 4])
    cache.run([1, 2, 5, 6])
    assert cache.edges() == [[1, 2], [3, 4], [5, 6]]
    assert cache.evict(1) == 1
    assert cache.edges() == [[1, 2], [3], [5, 6]], "from its end: what is left of it can still be had"
    assert cache.evict(1) == 1
    assert cache.edges() == [[1, 2, 5, 6]], "a parent left with one child merges with it"
    assert cache.evict(4) == 4
    assert not cache.kv.index.trees.roots


def test_a_match_refreshes_the_matched_part_of_a_leaf_only():
    cache = Cache()
    cache.run([1, 2, 3, 4])
    cache.run([9, 8, 7, 6])
    cache.run([1, 2, 5])
    cache.evict(2)
    assert cache.edges() == [[1, 2, 5], [9, 8, 7, 6]], "nobody used 3, 4 since"
    cache.run([9, 8, 7, 6, 5])
    cache.evict(3)
    assert cache.edges() == [[9, 8, 7, 6, 5]]


def test_document_003_car_carpet_cartridge_care_gives_five_nodes():
    cache = Cache()
    for word in ("carpet", "cartridge", "care"):
        cache.run(word.encode())
    table = cache.admit(b"car").table  # it has a leaf of its own while it runs
    cache.step()
    cache.kv.cache_blocks(table, 3, 3)  # the tree replaces the r that it computed for its logits
    assert words(cache) == ["car", "e", "pet", "tridge"]
    assert len(list(cache.kv.index.trees.nodes())) == 5, "and the root"
    assert cache.matched(b"cartoon") == 4
    assert cache.matched(b"dog") == 0


def test_document_003_hello_and_help_split_and_a_deletion_merges_again():
    cache = Cache()
    cache.run(b"hello")
    cache.run(b"help")
    assert words(cache) == ["hel", "lo", "p"]
    cache.evict(2)
    assert words(cache) == ["help"]


def test_document_003_a_prefix_of_fifty_conversations_outlives_all_of_them():
    cache = Cache(num_blocks=200, block_size=4)
    system = list(range(100, 108))
    for i in range(50):
        cache.run([*system, *[i] * 8])
    assert len(cache.edges()) == 51
    for left in range(49, -1, -1):
        assert cache.matched([*system, 1000, 2]) == 8
        cache.evict(2)
        assert sum(edge[0] < 100 or len(edge) > 8 for edge in cache.edges()) == left
    assert cache.edges() == [system], "childless, it is a leaf itself"
    cache.evict(2)
    assert cache.edges() == []


def test_a_parent_in_use_is_not_evicted_when_it_is_childless():
    cache = Cache()
    cache.run([1, 2, 3])
    cache.admit([1, 2, 9])
    assert cache.evict(10) == 1, "only the 3"
    cache.step()
    cache.release(cache.num_seqs)
    assert cache.evict(10) == 3


def test_R5_seventeen_shared_tokens_reuse_seventeen_with_blocks_of_sixteen():
    cache = Cache(block_size=16)
    shared = list(range(17))
    cache.run([*shared, 50, 51])
    admission = cache.admit([*shared, 60, 61])
    assert (admission.num_tokens, admission.num_shared_blocks, admission.num_copied_tokens) == (17, 1, 1)
    (move,) = cache.kv.launched(99)
    assert move.num_tokens == 1


def test_R5_the_block_that_a_running_sequence_fills_is_copied_too():
    cache = Cache(block_size=16)
    cache.admit(range(20))
    assert cache.admit([*range(19), 90, 91]).num_tokens == 16, "the step that writes the rest is not launched yet"
    cache.step()
    assert cache.admit([*range(19), 80, 81]).num_tokens == 19


def test_M12_a_hundred_requests_with_a_thousand_tokens_in_common_save_99_percent():
    cache = Cache(num_blocks=400, block_size=16)
    prefix = list(range(1000))
    for i in range(100):
        cache.admit([*prefix, 2000 + i, 3000], record=True)
        if not i:
            cache.step()
    unshared = 100 * -(-1000 // 16)
    first = {table.blocks[0][j] for table in cache.kv.tables.values() for j in range(62)}
    assert (unshared, len(first)) == (6300, 62)
    total = {block for table in cache.kv.tables.values() for block in table.blocks[0]}
    own = len(total) - len(first)
    assert own == 100, "each has the block in which the prefix ends, and goes on in it"
    assert round(100 * (1 - 63 / unshared), 1) == 99.0
    assert cache.kv.sharing(list(cache.kv.tables))[0] == 6300


def test_requests_that_arrive_together_compute_a_common_prefix_once():
    cache = Cache(block_size=4)
    assert cache.admit(range(10)).num_tokens == 0
    second = cache.admit([*range(8), 90, 91])
    assert (second.num_tokens, second.num_shared_blocks) == (8, 2)


def test_equal_blocks_that_two_computed_are_exchanged_when_they_are_written():
    cache = Cache(block_size=4)
    first = cache.admit(range(8), record=False).table
    second = cache.admit(range(8), record=False).table
    cache.kv.cache_blocks(first, 0, 8)
    assert cache.kv.cache_blocks(second, 0, 8) is None, "it is about to write its own"
    assert second.cursor.num_indexed == 0
    cache.step()
    assert cache.kv.cache_blocks(second, 8, 8) == [0]
    assert second.blocks == first.blocks
    assert cache.kv.check() == []
    assert cache.kv.pools.num_free == 98


def test_namespaces_do_not_see_each_other_but_for_public_prefixes():
    public = [7] * 8
    cache = Cache(block_size=4, public=[public])
    cache.run([*public, 1, 2, 3, 4, 5], Namespace("a"))
    assert cache.matched([*public, 1, 2, 3], Namespace("a")) == 11
    assert cache.matched([*public, 1, 2, 3], Namespace("b")) == 8
    assert cache.matched([*public, 1, 2, 3], Namespace("a", "salt")) == 8
    assert cache.matched(public[:6], Namespace("b")) == 6, "a part of a public block"
    assert cache.matched(public, Namespace("b", "", "lora")) == 0, "computed with other weights"
    assert cache.admit(public, Namespace("b")).num_tokens == 7, "of whole public blocks, all but the last token"


def test_a_fork_that_leaves_a_public_prefix_is_not_public():
    cache = Cache(block_size=2, public=[[7] * 8])
    cache.admit([7] * 8)
    cache.step()
    child = cache.kv.fork(1, 50, 4, [7, 7, 7, 7, 1, 2, 3])
    cache.kv.grow(child, 7)
    cache.kv.cache_blocks(child, 4, 7)
    cache.step()
    assert cache.matched([7, 7, 7, 7, 1, 2], NS) == 6
    assert cache.matched([7, 7, 7, 7, 1, 2], Namespace("other")) == 4


def test_a_half_full_block_left_as_public_by_one_fork_goes_on_otherwise_in_another():
    cache = Cache(block_size=4, public=[[7] * 8])
    cache.admit([7] * 8 + [1], record=False)
    cache.kv.launched(1000)
    cache.kv.collected(1000)
    child = cache.kv.fork(1, 50, 7, [7] * 7 + [2, 3])
    cache.kv.release(1, 7)
    cache.kv.grow(child, 9)
    cache.kv.cache_blocks(child, 7, 9)
    assert cache.kv.check() == []
    assert cache.matched([7] * 7 + [2, 3]) == 8


def test_a_half_full_block_left_by_one_fork_goes_on_as_public_in_another():
    cache = Cache(block_size=4, public=[[7] * 8])
    cache.admit([7] * 8 + [1], record=False)
    cache.kv.launched(1000)
    cache.kv.collected(1000)
    cache.kv.fork(1, 50, 7, [7] * 7 + [2, 3])
    cache.kv.release(50, 7)
    parent = cache.kv.tables[1]
    cache.kv.grow(parent, 9)
    cache.kv.cache_blocks(parent, 7, 9)
    assert cache.kv.check() == []
    assert cache.matched([7] * 8 + [1]) == 8
    cache.kv.release(1, 9)
    assert cache.kv.check() == []


def test_a_pool_that_is_full_of_what_was_found_admits_all_the_same():
    cache = Cache(num_blocks=4, block_size=4)
    cache.run(range(14))
    admission = cache.run([*range(14), 90, 91])
    assert admission.num_tokens == 12, "there is no room for the last block beside its copy"


def test_without_free_blocks_nothing_has_changed():
    cache = Cache(num_blocks=4, block_size=4)
    cache.admit(range(12))
    cache.step()
    kv = cache.kv
    assert kv.admit(9, list(range(20)), NS, reusable=19, limit=20, max_new_positions=20) is None
    assert (kv.pools.num_free, list(kv.tables)) == (1, [1])
    assert kv.check() == []


def test_kv_of_a_failed_step_is_removed_and_sequences_that_share_it_are_restarted():
    cache = Cache(block_size=4)
    cache.run(range(4))
    cache.admit(range(12))
    sharer = cache.num_seqs + 1
    assert cache.admit([*range(12), 50]).num_tokens == 12
    cache.kv.launched(1000)
    assert cache.kv.failed(1000) == [sharer]
    cache.kv.release(sharer, 0)
    assert cache.matched(range(12)) == 4
    assert cache.kv.check() == []


def test_a_copy_that_a_failed_step_carried_is_no_ground_for_the_next_step():
    cache = Cache(block_size=4)
    cache.run(range(6))
    copier = cache.admit([*range(6), 90], record=False).table
    cache.kv.launched(1000)
    assert copier.capacity == 8
    cache.kv.launched(1001)  # this step reads the copy
    assert cache.kv.failed(1000) == [cache.num_seqs]
    cache.kv.release(cache.num_seqs, 0)
    cache.kv.collected(1001)
    assert cache.kv.launched(1002) == []
    assert cache.kv.check() == []


def test_repair_begins_an_index_again_that_cannot_be_trusted():
    cache = Cache(block_size=4)
    cache.run(range(12))
    table = cache.admit(range(9)).table
    cache.step()
    next(node for node in cache.kv.index.trees.nodes() if node.parent is not None).end += 1
    assert cache.kv.check() != []
    cache.kv.repair()
    assert cache.kv.check() == []
    assert cache.matched(range(9)) == 4, "of the sequence that runs, in whose table all of it is"
    cache.kv.cache_blocks(table, 9, 9)
    assert cache.matched(range(9)) == 9


# Reasons of a miss


def reason(admission) -> tuple[int, str]:
    return admission.miss.position, admission.miss.reason


def test_a_miss_reports_never_seen_or_last_token_or_recomputed():
    cache = Cache(block_size=4)
    assert reason(cache.run([1, 2, 3, 4, 5, 6])) == (0, "never_seen")
    assert reason(cache.run([1, 2, 3, 4, 5, 9, 9])) == (5, "never_seen")
    assert reason(cache.run([1, 2, 3, 4, 5, 6])) == (5, "last_token")
    assert reason(cache.run([1, 2, 3, 4, 5, 6], reusable=0)) == (0, "recomputed")
    assert reason(cache.run([1, 2, 3, 4, 5, 6], reusable=3)) == (3, "recomputed")


@pytest.mark.parametrize(("tenant", "whom"), [("tenant", "big"), ("other", None)])
def test_a_miss_by_eviction_reports_time_and_request_but_no_request_of_another_tenant(tenant, whom):
    cache = Cache(block_size=4)
    cache.run(range(12))
    cache.evict(2, EvictionCause(17.5, "big", tenant))
    miss = cache.run(range(12)).miss
    assert (miss.position, miss.token, miss.reason) == (4, 4, "evicted")
    assert (miss.evicted_at, miss.evicted_for) == (17.5, whom)


def test_a_miss_does_not_report_evictions_in_another_namespace():
    cache = Cache(block_size=4)
    cache.run(range(12), Namespace("other"))
    cache.evict(9, EvictionCause(17.5, "big", "other"))
    assert reason(cache.run(range(12))) == (0, "never_seen")


def test_a_miss_reports_a_prefix_that_is_being_computed():
    cache = Cache(block_size=4)
    table = cache.admit(range(12), record=False).table
    cache.kv.cache_blocks(table, 0, 6)
    assert reason(cache.admit(range(11))) == (4, "being_computed"), "by this step or a later one"
    assert reason(cache.admit([0, 1, 2, 3, 9, 9])) == (4, "never_seen")


@pytest.mark.parametrize(
    ("where", "why"),
    [
        (Namespace("tenant", "salt"), "other_salt"),
        (Namespace("tenant", "", "lora"), "other_adapter"),
        (Namespace("tenant", "", "", True), "other_adapter"),  # noqa: FBT003  # kernels
        (Namespace("other"), "never_seen"),
    ],
)
def test_a_miss_reports_another_namespace_of_the_same_tenant(where, why):
    cache = Cache(block_size=4)
    cache.run(range(12), where)
    assert reason(cache.run(range(12))) == (0, why)


# Run time


def seconds_per_eviction(num_leaves: int) -> float:
    cache = KVCache(radix_config(2 * num_leaves + 10, 1))
    for i in range(num_leaves):
        tokens = [i % 997, i]
        cache.admit(i, tokens, NS, reusable=1, limit=2, max_new_positions=2)
        cache.cache_blocks(cache.tables[i], 0, 2)
        cache.launched(i)
        cache.collected(i)
        cache.release(i, 2)
    times = []
    for _ in range(300):
        began = thread_time()
        assert cache.index.evict(0, 1, NOBODY) == 1
        times.append(thread_time() - began)
    return sorted(times)[150]


def test_evicting_one_block_takes_hardly_longer_among_twenty_times_the_leaves():
    assert seconds_per_eviction(20_000) < 5 * seconds_per_eviction(1_000), "median of 300; linear would be 20 times"


def test_least_recent_keeps_no_more_than_it_needs():
    leaves = LRUNodes()
    stays = Node(0, b"", [[]], None, 0)
    leaves.add(stays)
    for number in range(1, 10_000):
        node = Node(number, b"", [[]], None, 0)
        node.tick = number
        leaves.add(node)
        leaves.discard(node)
    assert len(leaves) == 1
    assert num_held(leaves) <= 67
    assert leaves.pop() is stays
    assert leaves.pop() is None


def test_least_recent_gives_the_one_that_was_used_last_last():
    leaves = LRUNodes()
    nodes = [Node(number, b"", [[]], None, 0) for number in range(3)]
    for tick, node in enumerate(nodes):
        node.tick = tick
        leaves.add(node)
    nodes[0].tick = 9
    assert [leaves.pop() for _ in range(3)] == [nodes[1], nodes[2], nodes[0]]
