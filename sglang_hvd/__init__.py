"""Hybrid Verified Decoding for SGLang: see README.md and docs/."""

__version__ = "0.1.0"
