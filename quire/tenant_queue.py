"""Queue of jobs for a few threads, in which tenants take turns."""

import threading
from collections import Counter, deque
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueue(Generic[T]):
    """Jobs of tenants, taken round-robin by tenant, and in order within a tenant. Can be used from any thread.

    max_per_tenant: jobs of one tenant that run at once. With more threads than that, a tenant's first job does not wait
    for the end of another tenant's job.
    """

    def __init__(self, max_per_tenant: int) -> None:
        self._max_per_tenant = max_per_tenant
        self._changed = threading.Condition()
        self._waiting: dict[str, deque[T]] = {}  # of tenants with waiting jobs, in the order of their turns
        self._num_running = Counter[str]()
        self._closed = False

    def put(self, tenant: str, job: T) -> None:
        """Add a job."""
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(job)
            self._changed.notify()

    def get(self) -> tuple[str, T] | None:
        """The next job and its tenant, once there is one; None after `close`. `done` must follow the job's end."""
        with self._changed:
            while not self._closed:
                tenant = next((one for one in self._waiting if self._num_running[one] < self._max_per_tenant), None)
                if tenant is not None:
                    jobs = self._waiting.pop(tenant)
                    job = jobs.popleft()
                    if jobs:
                        self._waiting[tenant] = jobs  # at the end
                    self._num_running[tenant] += 1
                    return tenant, job
                self._changed.wait()
        return None

    def done(self, tenant: str) -> None:
        """A job of this tenant has ended."""
        with self._changed:
            self._num_running[tenant] -= 1
            if not self._num_running[tenant]:
                del self._num_running[tenant]
            self._changed.notify()

    def close(self) -> list[T]:
        """Let every `get` return None. Returns the jobs that were waiting."""
        with self._changed:
            self._closed = True
            left = [job for jobs in self._waiting.values() for job in jobs]
            self._waiting.clear()
            self._changed.notify_all()
        return left
