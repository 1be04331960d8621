"""Hybrid Verified Decoding for SGLang: see README.md and docs/."""
