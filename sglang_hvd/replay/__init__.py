"""Replay: the drafter on recorded generations, without a model."""
