"""When a replica starts the next engine, and when it stops to start engines.

An engine that ends is replaced at once, unless engines end before they have served. A start that failed is repeated
after a delay that doubles from FIRST_DELAY to MAX_DELAY seconds, until an engine serves or `timeout` seconds have
passed since the outage began. An engine has served if it committed a step, or was connected for MIN_LIFETIME. All
failures count alike: a refusal, a signal, no memory for a process. Callers pass the time in seconds of a monotonic
clock.
"""

RESTART_TIMEOUT = 600.0  # seconds, the default of `timeout`
FIRST_DELAY = 0.25  # seconds after the first failed start
MAX_DELAY = 5.0  # seconds
MAX_CRASHES = 24  # engines in a row that crash with requests before they commit a step, or before a culprit is found
MIN_LIFETIME = 5.0  # seconds; an engine without a committed step that ends sooner has not served


class RestartPolicy:
    """The failed starts and crashes since an engine last served.

    timeout: in seconds; 0 means no limit. now: when the first engine was started.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._outage_began = now  # when the last engine that served ended, or the first engine after it
        self._num_unserved = 0  # engines since then that ended before they served
        self._num_failed_starts = 0  # since then; idle engines that ended before they served count, too
        self.num_crashes = 0  # engines in a row that crashed with requests, without a committed step

    @property
    def delay(self) -> float:
        """Seconds to wait before the next start."""
        if not self._num_failed_starts:
            return 0.0
        doublings = min(self._num_failed_starts - 1, 16)  # 2.0 ** 1024 would overflow
        return min(FIRST_DELAY * 2.0**doublings, MAX_DELAY)

    @property
    def deadline(self) -> float | None:
        """The time after which no engine is started; None: never."""
        return self._outage_began + self._timeout if self._timeout else None

    @property
    def is_crash_loop(self) -> bool:
        """Whether more engines crashed with requests than crash bisection needs."""
        return self.num_crashes > MAX_CRASHES

    def record_request(self, now: float) -> None:
        """Record that an engine ended because a restart was asked for, which begins the outage."""
        self._outage_began = now
        self._num_unserved = self._num_failed_starts = 0

    def record_failed_start(self) -> None:
        """Record a start that failed."""
        self._num_failed_starts += 1

    def record_end(
        self, now: float, *, lifetime: float, num_committed: int, had_work: bool, found_culprit: bool = False
    ) -> None:
        """Record the end of an engine that had started.

        lifetime: seconds for which it was connected. num_committed: its committed steps. had_work: whether requests or
        calls were open. found_culprit: whether a request was found that crashes engines, and has failed.
        """
        if num_committed or found_culprit:
            self.num_crashes = 0
        elif had_work:
            self.num_crashes += 1
        has_served = num_committed > 0 or lifetime >= MIN_LIFETIME
        if has_served or not self._num_unserved:
            self._outage_began = now
        self._num_unserved = 0 if has_served else self._num_unserved + 1
        if has_served:
            self._num_failed_starts = 0
        elif not had_work:
            self._num_failed_starts += 1
