"""Updates: changes put together are the whole state at any time, and the state is that of scheduler and cache."""

import json
import random

import msgspec
import pytest
from example_budget import examples
from scripted_engine import Rig
from viewer_state import ViewerState, whole

from quire.cache.block_table import ABSENT
from quire.core.adapter import Adapter
from quire.core.request import Beams, Namespace, Request
from quire.core.scheduling_params import Retention, SchedulingParams
from quire.errors import RequestError
from quire.monitor import tree
from quire.monitor.monitor import LOAD_SECONDS, Load, Monitor
from quire.monitor.update import Watcher
from quire.params import SamplingParams

EVERYTHING = Watcher("", sees_all=True)
TENANTS = ("ann", "bob", "eve")
KINDS = {
    "radix": {"prefix_index": "radix"},
    "two in flight": {"prefix_index": "radix", "steps_in_flight": 2},
    "hash": {"prefix_index": "hash"},
    "none": {"prefix_index": "none"},
    "window": {"prefix_index": "radix", "windows": (0, 8)},
    "host": {"prefix_index": "radix", "num_host_blocks": 32, "preemption": "swap", "steps_in_flight": 2},
    "cost": {"prefix_index": "radix", "eviction": "cost"},
    "states": {"prefix_index": "radix", "states": 12, "num_host_blocks": 32, "preemption": "swap", "turn_ends": [3]},
}


class Traffic:
    """A rig under random requests of three tenants, which share prefixes, with aborts, beams and failed steps."""

    def __init__(self, seed, **options):
        self.rng = random.Random(seed)
        self.rig = Rig(num_blocks=28, seed=seed, fails=lambda step: self.rng.random() < 0.02, **options)
        self.prefixes = [[self.rng.randrange(50) for _ in range(12)] for _ in range(3)]
        self.names = []

    def add(self):
        rng, name = self.rng, f"r{len(self.names)}"
        prompt = rng.choice(self.prefixes)[: rng.randrange(1, 12)] + [
            rng.randrange(50) for _ in range(rng.randrange(12))
        ]
        kind = rng.random()
        more = {"n": 2} if kind < 0.2 else {}
        if kind > 0.9:
            more = {"beams": Beams(width=2, num_candidates=4, length_penalty=1.0, early_stopping=False)}
        retention = Retention(pin=True, ttl=rng.choice([0.01, None])) if rng.random() < 0.1 else Retention()
        where = Namespace(tenant=rng.choice(TENANTS), salt=rng.choice(["", "", "s"]))
        params = SchedulingParams(retention=retention)
        self.names.append(name)
        self.rig.add(name, prompt, namespace=where, max_tokens=rng.randrange(1, 40), scheduling_params=params, **more)

    def move(self):
        event = self.rng.random()
        if event < 0.4:
            self.add()
        elif event < 0.48 and self.names:
            self.rig.abort(self.rng.choice(self.names))
        elif event < 0.49:
            self.rig.engine.flush_cache()
        self.rig.step()


class PageViewer:
    """A viewer that puts its updates together."""

    def __init__(self, monitor, number, watcher):
        self.monitor, self.number, self.watcher = monitor, number, watcher
        self.state, self.num_seen = ViewerState(), 0

    def update(self, now):
        update = self.monitor.update(self.number, self.watcher, self.num_seen, now, 0.0)
        self.num_seen += 1
        self.state.apply(decoded(update))

    def full(self, now):
        """The whole state, as another viewer sees it first."""
        update = self.monitor.update(-1, self.watcher, 0, now, 0.0)
        self.monitor.forget(-1)
        assert update.full
        return whole(decoded(update))


def decoded(update):
    return json.loads(msgspec.json.encode(update))


def without_numbers(state):
    """The state with ids of sequences in place of owner numbers, which depend on what a viewer has seen before."""
    seqs = {str(row["owner"]): f"seq{row['seq']}" for row in state["requests"]} | {"0": "nobody"}

    def named(one):
        letter, _, number = one.partition(":")
        return f"{letter}:{seqs[number]}" if number else letter

    renamed = {key: {p: list(map(named, some)) for p, some in state[key].items()} for key in ("blocks", "host")}
    requests = [{**row, "owner": None} for row in state["requests"]]
    return {**state, **renamed, "requests": requests}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(examples(8)))
def test_changes_put_together_are_the_whole_state(kind, seed, monkeypatch):
    monkeypatch.setattr(tree, "MOST_NODES", 12)
    monkeypatch.setattr(tree, "_FEWEST_NODES", 8)
    monkeypatch.setattr(tree, "_MOST_REMOVALS", 6)
    traffic = Traffic(seed, **KINDS[kind])
    rig, rng = traffic.rig, random.Random(seed)
    monitor = Monitor(rig.scheduler, Load())
    views = [PageViewer(monitor, i, watcher) for i, watcher in enumerate((EVERYTHING, Watcher("ann", sees_all=False)))]
    views.append(PageViewer(monitor, 2, EVERYTHING))
    num_compared = 0
    for _ in range(250):
        traffic.move()
        for seen in views:
            if rng.random() < (0.5, 0.5, 0.05)[seen.number]:
                seen.update(rig.now)
                assert without_numbers(seen.state.whole) == without_numbers(seen.full(rig.now))
                num_compared += 1
    assert num_compared > 100 and rig.engine.stats().num_preemptions > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(examples(4)))
def test_blocks_are_those_of_tables_and_index(kind, seed):
    traffic = Traffic(10 + seed, **KINDS[kind])
    rig = traffic.rig
    monitor = Monitor(rig.scheduler, Load())
    everything, own = PageViewer(monitor, 0, EVERYTHING), PageViewer(monitor, 1, Watcher("ann", sees_all=False))
    letters, num_snapshots = set(), 0
    for _ in range(200):
        traffic.move()
        for seen in (everything, own):
            seen.update(rig.now)
            state = without_numbers(seen.state.whole)
            for group, pool in enumerate(rig.cache.pools):
                assert state["blocks"][group] == expected_blocks(rig, seen.watcher, group), seen.watcher
                rest = "F" if seen is everything else "O"
                assert state["blocks"][group].count(rest) == state["pools"][group]["num_free"]
                if seen is everything:
                    assert pool.num_free == state["pools"][group]["num_free"]
                letters |= {one.partition(":")[0] for one in state["blocks"][group]}
            if rig.cache.states is not None:
                assert state["blocks"][group + 1] == expected_states(rig, seen.watcher), seen.watcher
                assert state["pools"][group + 1]["block_size"] == 0
                assert state["pools"][group + 1]["num_idle"] == state["blocks"][group + 1].count("C")
                assert {row[0]: row[-1] for row in state["nodes"].values()} == expected_snapshots(rig, seen)
                num_snapshots += sum(row[-1] for row in state["nodes"].values())
            for group, pool in enumerate(rig.cache.host_pools):
                states = state["host"].get(group, [])
                assert states.count("F") == (pool.num_free if seen is everything else 0)
    assert letters >= ({"F", "U", "O"} if kind == "none" else {"F", "U", "C", "O"})
    assert (num_snapshots > 0) == (kind == "states")


def expected_blocks(rig, watcher, group):
    """The states of all blocks, one by one."""
    cache, pool = rig.cache, rig.cache.pools[group]
    mine = [seq for seq in rig.scheduler.state.running_queue.running if sees(watcher, seq.request.namespace.tenant)]
    pins = set() if cache.index.retention is None else set(cache.index.retention.pin_refs(group))
    nodes = list(cache.index.trees.nodes()) if hasattr(cache.index, "trees") else []
    own = {block for node in nodes if sees(watcher, node.tenant) for block in node.blocks[group]} - {ABSENT}
    states = []
    for block in range(pool.num_blocks):
        users = [seq.id for seq in mine if block in seq.table.blocks[group]]
        is_own = pool.is_indexed(block) if watcher.sees_all else block in own
        if not pool.num_refs(block):
            states.append("F" if watcher.sees_all else "O")
        elif users:
            states.append(f"{'S' if len(users) > 1 else 'U'}:seq{users[0]}")
        elif is_own:
            states.append("P" if block in pins else "C")
        else:
            states.append("U:nobody" if watcher.sees_all else "O")
    return states


def sees(watcher, tenant):
    return watcher.sees_all or tenant == watcher.tenant


def test_nodes_are_those_of_the_trees():
    traffic = Traffic(5, prefix_index="radix")
    rig = traffic.rig
    seen = PageViewer(Monitor(rig.scheduler, Load()), 0, EVERYTHING)
    gone, merged = set(), 0
    for _ in range(300):
        traffic.move()
        before = set(seen.state.nodes) if seen.num_seen else set()
        seen.update(rig.now)
        nodes = {node.id: node for node in rig.cache.index.trees.nodes()}
        assert seen.state.nodes.keys() == nodes.keys()
        running = [seq.table for seq in rig.scheduler.state.running_queue.running]
        for (
            number,
            parent,
            num_tokens,
            num_blocks,
            hits,
            num_users,
            used,
            created,
            kind,
            text,
            num_snapshots,
        ) in seen.state.nodes.values():
            assert num_snapshots == 0
            node = nodes[number]
            assert parent == (-1 if node.parent is None else node.parent.id)
            assert (num_tokens, num_blocks) == (len(node.edge) // 8, len(node.blocks[0]))
            below = set(node.walk())
            assert num_users == sum(table.cursor.handle in below for table in running)
            assert (kind == 1) == (num_users > 0) or kind == 2
            assert created <= used <= rig.now and hits == node.most_hits
            assert text == (node.tenant if parent == -1 else "")
        evicted = set(seen.state.last["tree"]["evicted"])
        assert evicted <= before - nodes.keys()
        merged += len(seen.state.last["tree"]["hidden"])
        gone |= evicted
    assert gone and merged, "nodes were evicted, and nodes were merged"


def test_steps_have_tokens_by_kind_and_seconds_once_they_are_known():
    rig = Rig(steps_in_flight=2, prefix_index="radix")
    seen = PageViewer(Monitor(rig.scheduler, Load()), 0, EVERYTHING)
    own = PageViewer(seen.monitor, 1, Watcher("ann", sees_all=False))
    rig.add("a", list(range(10)), max_tokens=6, namespace=Namespace(tenant="ann"))
    for _ in range(3):
        rig.step()
        seen.update(rig.now)
    measured = [row[3] is None for row in sorted(seen.state.steps.values())]
    assert len(measured) > 1 and measured == [False] * (len(measured) - 1) + [True], "one step is in flight"
    rig.add("b", list(range(20, 28)), max_tokens=3, namespace=Namespace(tenant="bob"))
    rig.run()
    seen.update(rig.now)
    own.update(rig.now)
    rows = seen.state.whole["steps"]
    assert sum(row[4] for row in rows) == 18, "prompt tokens"
    assert sum(row[5] for row in rows) == 5 + 2, "each but the first output token is computed by a decode"
    assert all(row[3] is not None for row in rows) and [row[0] for row in rows] == list(range(len(rows)))
    mine = own.state.whole["steps"]
    assert sum(row[4] for row in mine) == 10 and sum(row[5] for row in mine) == 5
    assert all(row[2:4] == row[9:][:2] == [None, None] and row[11] is None for row in mine)
    assert {row[8] for row in mine} == {1}
    assert {row[8] for row in rows} >= {1, 2}


def test_totals_count_each_tenant():
    rig = Rig(prefix_index="radix")
    for name in ("ann", "bob"):
        for i in range(2):
            rig.add(f"{name}{i}", [*range(16), i], max_tokens=3, namespace=Namespace(tenant=name))
            rig.run()
    monitor = Monitor(rig.scheduler, Load())
    all_of_it = monitor.update(0, EVERYTHING, 0, rig.now, 0.0).totals
    own = monitor.update(1, Watcher("ann", sees_all=False), 0, rig.now, 0.0).totals
    nobody = monitor.update(2, Watcher("zoe", sees_all=False), 0, rig.now, 0.0).totals
    assert (own.prompt_tokens, own.output_tokens, own.queried_tokens, own.cached_tokens) == (34, 6, 34, 16)
    assert (own.finished, own.preemptions) == (2, 0)
    doubled = [2 * number for number in msgspec.structs.astuple(own)]
    assert list(msgspec.structs.astuple(all_of_it)) == doubled
    assert set(msgspec.structs.astuple(nobody)) == {0}


def test_a_row_says_how_far_its_prompt_is_and_totals_count_what_was_computed():
    rig = Rig(max_num_batched_tokens=16, prefix_index="radix")
    rig.add("a", list(range(40)), max_tokens=2)
    rig.run()
    rig.add("b", [*range(40), *range(30)], max_tokens=4)
    monitor = Monitor(rig.scheduler, Load())
    seen = []
    for _ in range(3):
        update = monitor.update(0, EVERYTHING, 0, rig.now, 0.0)
        (row,) = update.requests
        figures = update.totals.prompt_tokens - 40, update.totals.cached_tokens
        seen.append((row.state, row.num_prompt_done, row.num_prompt, figures))
        rig.step()
    assert seen == [
        ("waiting", 0, 70, (0, 0)),
        ("running", 56, 70, (56, 40)),
        ("running", 70, 70, (70, 40)),
    ]


def test_waiting_requests_say_why():
    rig = Rig(max_num_seqs=1, prefix_index="radix")
    rig.add("a", list(range(8)), max_tokens=20)
    rig.add("b", list(range(8)), max_tokens=20, n=2)
    rig.step()
    rig.step()
    rows = Monitor(rig.scheduler, Load()).update(0, EVERYTHING, 0, rig.now, 0.0).requests
    assert [(row.id, row.state) for row in rows] == [("a", "running"), ("b", "waiting"), ("b", "waiting")]
    assert [row.reason.partition(":")[0] for row in rows] == ["", "rows", "prompt"]


def test_rows_name_the_adapter_of_their_request():
    rig = Rig(max_num_seqs=2, max_loras=1, lora_bytes=100)
    scheduler, adapter = rig.scheduler, Adapter("1f", "poet", "/adapters/poet", 10, 8)
    rig.engine.add(Request("a", [1, 2, 3], SamplingParams(max_tokens=9), adapter=adapter))

    def rows():
        found = Monitor(scheduler, Load()).update(0, EVERYTHING, 0, rig.now, 0.0).requests
        return {row.id: (row.state, row.adapter, row.reason) for row in found}

    assert rows()["a"] == ("waiting", "poet", "adapter: its adapter is not in memory yet")
    assert scheduler.plan(rig.now) is None
    (load,) = scheduler.take_adapter_loads()
    assert load.adapter is adapter
    scheduler.adapter_loaded("1f", "", rig.now)
    rig.add("b", [1, 2, 3], max_tokens=9)
    scheduler.plan(rig.now)
    assert rows() == {"a": ("running", "poet", ""), "b": ("running", "", "")}


def test_an_update_that_was_lost_leads_to_a_full_one():
    rig = Rig(prefix_index="radix")
    monitor = Monitor(rig.scheduler, Load())
    about = (EVERYTHING, rig.now)
    assert monitor.update(0, EVERYTHING, 0, 0.0, 0.0).full
    assert not monitor.update(0, EVERYTHING, 1, 0.0, 0.0).full
    assert monitor.update(0, EVERYTHING, 1, 0.0, 0.0).full, "the second update did not arrive"
    assert not monitor.update(0, EVERYTHING, 2, 0.0, 0.0).full
    assert monitor.update(7, EVERYTHING, 3, 0.0, 0.0).full, "an engine that has restarted knows no viewer"
    assert about


def test_a_repaired_index_leads_to_a_full_update():
    traffic = Traffic(3, prefix_index="radix")
    seen = PageViewer(Monitor(traffic.rig.scheduler, Load()), 0, EVERYTHING)
    for _ in range(40):
        traffic.move()
    seen.update(traffic.rig.now)
    old = traffic.rig.cache.index
    next(iter(old.trees.nodes())).edge += b"wrong"
    traffic.rig.scheduler.repair()
    assert traffic.rig.cache.index is not old
    seen.update(traffic.rig.now)
    assert seen.state.last["full"]
    assert without_numbers(seen.state.whole) == without_numbers(seen.full(traffic.rig.now))


def test_nothing_is_recorded_without_viewers(monkeypatch):
    calls = []
    for name in ("planned", "committed", "steps"):
        monkeypatch.setattr(
            f"quire.scheduler.step_log.StepLog.{name}", lambda *args, name=name: calls.append(name) or []
        )
    monkeypatch.setattr("quire.engine.engine.Monitor.update", lambda *args: calls.append("update") or {})
    rig = Rig(prefix_index="radix")
    trees = rig.cache.index.trees

    def run():
        rig.add(f"r{len(rig.reasons)}", list(range(9)), max_tokens=4)
        rig.run()

    run()
    assert not calls and rig.scheduler.step_log is None and not trees._changes
    rig.engine.monitor_update(1, EVERYTHING, 0)
    monkeypatch.setattr("quire.monitor.monitor.Monitor.num_viewers", 0)
    run()
    assert {"update", "planned", "committed"} <= set(calls) and trees._changes
    rig.engine.forget_viewer(1)
    calls.clear()
    run()
    assert not calls and rig.scheduler.step_log is None and not trees._changes


def test_a_full_queue_lists_the_first_sequences(monkeypatch):
    monkeypatch.setattr("quire.monitor.monitor.MOST_SEQUENCES", 5)
    rig = Rig(max_num_seqs=2)
    for i in range(8):
        rig.add(str(i), [1, 2, 3], max_tokens=4)
    rig.step()
    update = Monitor(rig.scheduler, Load()).update(0, EVERYTHING, 0, rig.now, 0.0)
    assert [row.id for row in update.requests] == list("01234")
    assert (update.num_running, update.num_waiting) == (2, 6)


def expected_states(rig, watcher):
    """The states of all blocks of recurrent states, one by one."""
    states, running = rig.cache.states, rig.scheduler.state.running_queue.running
    mine = [seq for seq in running if sees(watcher, seq.request.namespace.tenant)]
    nodes = [node for node in rig.cache.index.trees.nodes() if sees(watcher, node.tenant)]
    own = {block for node in nodes for block in node.blocks[0]}
    found = []
    for block in range(states.pool.num_blocks):
        users = [seq.id for seq in mine if seq.table.state.block == block]
        if users:
            found.append(f"{'S' if len(users) > 1 else 'U'}:seq{users[0]}")
        elif states.anchors.get(block) in own:
            found.append("C")
        elif not watcher.sees_all:
            found.append("O")
        else:
            found.append("U:nobody" if block in rig.cache.blocks_in_flight(1) else "F")
    return found


def expected_snapshots(rig, seen):
    """By shown node: blocks with snapshots."""
    anchors = set(rig.cache.states.anchors.values())
    nodes = [node for node in rig.cache.index.trees.nodes() if node.id in seen.state.nodes]
    return {node.id: len(anchors & set(node.blocks[0])) for node in nodes}


def test_a_tenant_sees_only_sums_of_others():
    rig = Rig(prefix_index="radix", max_num_seqs=2)
    for i, name in enumerate(("bob", "ann", "bob")):
        rig.add(f"{name}{i}", [i] * 9, max_tokens=20, namespace=Namespace(tenant=name, salt=f"{name}'s"))
    rig.step()
    monitor = Monitor(rig.scheduler, Load())
    update = monitor.update(0, Watcher("ann", sees_all=False), 0, rig.now, 0.0)
    assert [row.id for row in update.requests] == ["ann1"] and update.requests[0].mine
    assert (update.num_running, update.num_waiting) == (1, 0)
    assert msgspec.structs.astuple(update.others) == (1, 1)
    assert update.steps == [] and update.step == -1, "the log begins with the first update"
    pool = update.pools[0]
    assert pool.num_blocks - pool.num_free - pool.num_idle == len(rig.cache.tables[1].blocks[0]), "others are not told"
    assert b"bob" not in msgspec.json.encode(update)
    other = next(row.id for row in monitor.update(1, EVERYTHING, 0, rig.now, 0.0).tree.nodes if row.text == "bob")
    assert rig.engine.node(EVERYTHING, other) is not None
    assert rig.engine.node(Watcher("ann", sees_all=False), other) is None
    with pytest.raises(RequestError):
        rig.add("ann1", [1])


def test_the_load_of_others_is_counted_seldom():
    """Otherwise a tenant could tell when a request of another begins and ends."""
    rig = Rig(prefix_index="radix")
    monitor, ann = Monitor(rig.scheduler, Load()), Watcher("ann", sees_all=False)

    def seen(at):
        update = monitor.update(0, ann, 0, at, 0.0)
        return update.others.running, update.step, [step.id for step in update.steps], update.blocks, update.pools

    before = seen(rig.now)
    rig.add("b", [1] * 30, max_tokens=20, namespace=Namespace(tenant="bob"))
    rig.step()
    assert seen(rig.now + LOAD_SECONDS / 2) == before
    assert seen(rig.now + LOAD_SECONDS)[0] == 1
    assert seen(rig.now + LOAD_SECONDS)[1:] == before[1:]


def test_too_many_changes_are_not_kept_but_all_begin_anew(monkeypatch):
    monkeypatch.setattr("quire.cache.prefix.radix_tree.MOST_CHANGES", 3)
    rig = Rig(prefix_index="radix")
    seen = PageViewer(Monitor(rig.scheduler, Load()), 0, EVERYTHING)
    seen.update(rig.now)
    for i in range(6):
        rig.add(f"r{i}", [(9 * i + j) % 50 for j in range(9)], max_tokens=2)
        rig.step()
    seen.update(rig.now)
    assert seen.state.last["full"]
    assert without_numbers(seen.state.whole) == without_numbers(seen.full(rig.now))
