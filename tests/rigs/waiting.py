"""Waiting for a condition in a test. DEADLINE only ends a test that fails: no machine needs nearly as long."""

import asyncio
import time

DEADLINE = 60  # seconds
_INTERVAL = 0.002  # seconds


def wait_until(condition):
    """Wait until a condition of another thread or process holds. Returns its value."""
    end = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < end, f"no success within {DEADLINE} s"
        time.sleep(_INTERVAL)
    return value


async def until(condition):
    """Wait until a condition holds, while the event loop runs. Returns its value."""
    async with asyncio.timeout(DEADLINE):
        while not (value := condition()):
            await asyncio.sleep(_INTERVAL)
        return value


async def turns(number=20):
    """Let all that is ready on the event loop run for some turns. Nothing that takes time is waited for."""
    for _ in range(number):
        await asyncio.sleep(0)
