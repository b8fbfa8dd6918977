"""Turns of tenants for the threads of a queue."""

import threading

from quire.tenant_queue import TenantQueue


def test_tenants_take_turns_and_keep_their_own_order():
    queue = TenantQueue(max_per_tenant=9)
    for tenant, job in (("a", 1), ("a", 2), ("a", 3), ("b", 4), ("c", 5), ("b", 6)):
        queue.put(tenant, job)
    assert [queue.get() for _ in range(6)] == [("a", 1), ("b", 4), ("c", 5), ("a", 2), ("b", 6), ("a", 3)]


def test_a_tenant_that_occupies_its_threads_waits_until_one_is_done():
    queue, taken = TenantQueue(max_per_tenant=1), []
    queue.put("a", 1)
    queue.put("a", 2)
    queue.put("b", 3)
    assert [queue.get(), queue.get()] == [("a", 1), ("b", 3)]
    thread = threading.Thread(target=lambda: taken.append(queue.get()))
    thread.start()
    queue.done("b")
    thread.join(0.05)
    assert thread.is_alive()
    queue.done("a")
    thread.join(60)
    assert taken == [("a", 2)]


def test_closing_the_tenant_queue_fails_waiting_jobs():
    queue = TenantQueue(max_per_tenant=1)
    queue.put("a", 1)
    assert queue.get() == ("a", 1)
    queue.put("a", 2)
    assert queue.close() == [2]
    assert queue.get() is None
