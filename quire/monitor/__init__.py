"""What people look at: the state of scheduler and cache as updates. Computed only while somebody looks."""
