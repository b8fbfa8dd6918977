"""Bytes that the front end holds for a tenant."""

import asyncio

from quire.tenant_memory import MAX_TENANT_BYTES, HeldBytes, TenantMemory


def test_holders_wait_for_bytes_of_their_tenant_in_the_order_of_their_arrival():
    async def run():
        held, order = TenantMemory(), []

        async def hold(name, num_bytes):
            await held.acquire(num_bytes)
            order.append(name)

        await hold("first", MAX_TENANT_BYTES // 2)
        await hold("second", MAX_TENANT_BYTES // 2)
        waiting = [
            asyncio.ensure_future(hold(name, size))
            for name, size in (("big", MAX_TENANT_BYTES // 2), ("small", 1), ("x", 2))
        ]
        await asyncio.sleep(0)
        assert order == ["first", "second"]
        waiting[2].cancel()
        held.release(5)
        await asyncio.sleep(0)
        assert order == ["first", "second"]  # the small one does not overtake
        waiting[0].cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert order == ["first", "second", "small"]
        held.release(MAX_TENANT_BYTES - 5 + 1)
        await hold("all", MAX_TENANT_BYTES)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_bytes_that_grow_are_counted_at_once_and_hold_back_the_next_holder():
    async def run():
        memory = TenantMemory()
        with HeldBytes(memory) as growing, HeldBytes(memory) as next_one:
            growing.add(MAX_TENANT_BYTES + 1)
            waiting = asyncio.ensure_future(next_one.hold(1, 10))
            await asyncio.sleep(0)
            assert memory.num_held == MAX_TENANT_BYTES + 1 and not waiting.done()
            growing.release()
            await waiting
            assert memory.num_held == 1
        assert memory.num_held == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_holders_that_wait_for_more_are_admitted_one_after_the_other_before_new_ones():
    async def run():
        memory, order = TenantMemory(), []
        holders = [HeldBytes(memory) for _ in range(4)]
        for one in holders:
            await one.hold(MAX_TENANT_BYTES // 4, 10)

        async def more(name, holder, num_bytes):
            with holder:
                await holder.hold(num_bytes, 10)
                order.append(name)
                assert memory.num_held <= MAX_TENANT_BYTES + num_bytes
                await holder.hold(1, 10)  # still more: it waits for no other
                await asyncio.sleep(0)

        new = asyncio.ensure_future(more("new", HeldBytes(memory), 1))
        await asyncio.sleep(0)
        waiting = [asyncio.ensure_future(more(place, one, MAX_TENANT_BYTES)) for place, one in enumerate(holders)]
        await asyncio.sleep(0)
        assert order == [0], "all hold bytes and wait for more: one is admitted"
        assert memory.num_waiting == 4
        await asyncio.gather(new, *waiting)
        assert order == [0, 1, 2, 3, "new"]
        assert memory.num_held == 0

    asyncio.run(asyncio.wait_for(run(), 60))


def test_a_holder_that_is_cancelled_while_it_waits_for_more_leaves_no_bytes():
    async def run():
        memory = TenantMemory()
        with HeldBytes(memory) as one, HeldBytes(memory) as other:
            await one.hold(MAX_TENANT_BYTES - 1, 10)
            await other.hold(1, 10)
            await one.hold(5, 10)
            waiting = asyncio.ensure_future(other.hold(5, 10))
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            assert (memory.num_held, memory.num_waiting) == (MAX_TENANT_BYTES + 5, 0)
        assert memory.num_held == 0
        with HeldBytes(memory) as all_of_it:
            await all_of_it.hold(10 * MAX_TENANT_BYTES, 10)  # more than the bound, when nothing else is held
            assert memory.num_held == 10 * MAX_TENANT_BYTES

    asyncio.run(asyncio.wait_for(run(), 60))
