"""Recordings replayed through the drafter: cycles, batches, their costs and totals."""
