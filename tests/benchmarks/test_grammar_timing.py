"""The timing trials: they can tell what their own tenant has used, else they would prove nothing."""

from benchmarks.trust.timing import timing


def test_the_timing_trials_detect_schemas_and_prompts_of_the_same_tenant():
    found = timing(num_trials=30)
    for channel in (found.schemas, found.answers):
        assert channel["auc_same_tenant"] > 0.7
        assert 0 <= channel["auc"] <= 1
