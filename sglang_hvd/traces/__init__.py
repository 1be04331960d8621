"""Recorded generations: their format, reading and writing them, and recording a live server."""
