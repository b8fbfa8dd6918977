"""The timing trial of the grammar cache: it can tell a shared cache, else it would prove nothing."""

from benchmarks.trust.timing import timing


def test_the_trial_tells_which_schema_its_own_tenant_has_used():
    found = timing(num_trials=30)
    assert found.auc_same_tenant > 0.7
    assert 0 <= found.auc <= 1
