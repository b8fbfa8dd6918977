"""The timing trials: they can tell what their own tenant has used, else they would prove nothing."""

from benchmarks.trust.timing import timing


def test_the_trials_tell_which_schema_and_prompt_their_own_tenant_has_used():
    found = timing(num_trials=30)
    for channel in (found.schemas, found.answers):
        assert channel["auc_same_tenant"] > 0.7
        assert 0 <= channel["auc"] <= 1
