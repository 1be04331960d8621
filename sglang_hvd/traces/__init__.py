"""Recorded generations: their form, reading, writing, and recording them from a live server."""
