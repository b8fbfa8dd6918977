"""An inspection of what an object holds, for tests that it leaves nothing behind: the sizes of all its containers.

A test compares the sizes before and after, or bounds them. It needs no name of a private attribute, and sees containers
that are added later.
"""

from collections.abc import Sized

from quire.scheduler.scheduler import Scheduler


def held(owner: object) -> dict[str, int]:
    """The length of each attribute of `owner` that is a container and can change."""
    slots = (name for cls in type(owner).__mro__ for name in getattr(cls, "__slots__", ()))
    attributes = {
        name: getattr(owner, name) for name in (*slots, *getattr(owner, "__dict__", ())) if hasattr(owner, name)
    }
    fixed = str, bytes, tuple, frozenset, type
    return {name: len(one) for name, one in attributes.items() if isinstance(one, Sized) and not isinstance(one, fixed)}


def num_held(owner: object) -> int:
    """The number of items in all containers of `owner`."""
    return sum(held(owner).values())


def waiting_tenants(scheduler: Scheduler) -> set[str]:
    """The tenants of which the statistics count waiting requests."""
    return set(scheduler.request_stats._tenants)
