"""The replicas behind one front end: their requests, streams, and what happens after a crash."""
