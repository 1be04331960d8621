"""Throughput and latency of ways of decoding, side by side in one run."""
