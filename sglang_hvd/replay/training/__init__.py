"""Predictors trained on replayed recordings, and judged on them."""
