"""Constraints: what may come next, which tokens have to, and which backend says so."""
