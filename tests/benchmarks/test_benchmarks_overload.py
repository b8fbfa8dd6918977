"""Throughput of an overloaded block pool, with the driver of benchmarks.overload."""

from benchmarks import overload


def test_three_times_the_demand_gets_as_much_done_as_what_the_pool_can_take():
    at_capacity = overload.under(6.0, 40, num_blocks=600)
    over = overload.under(18.0, 40, num_blocks=600)
    assert over.waiting > 200 and over.preemptions, "the pool is too small for it"
    assert over.tokens_per_second > 0.9 * at_capacity.tokens_per_second
