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

    asyncio.run(asyncio.wait_for(run(), 10))


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

    asyncio.run(asyncio.wait_for(run(), 10))
