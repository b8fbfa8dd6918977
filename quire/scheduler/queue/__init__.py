"""Queue policies: who is next. One class for each kind of order."""
