"""Recorded behaviour: schedules, greedy outputs and HTTP responses that a refactoring must not change.

    make corpus-check                                # compares, in about a minute; a part of make test
    python -m tools.corpus [schedules] [greedy] [http]   # records again, in a commit that changes behaviour on purpose

The records are in tests/assets/corpus.
"""
