"""Prompts to measure: the paper's data sets, sets that practitioners quote, local files."""
