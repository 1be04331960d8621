"""Throughput and latency of several ways of decoding, measured in one run."""
