"""Recorded generations served by the real engine, with any weights."""
