"""Hostile load of one tenant beside another tenant's stream."""
