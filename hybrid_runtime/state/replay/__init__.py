"""Replay: one live state per request, and a ring of records of its last tokens."""
