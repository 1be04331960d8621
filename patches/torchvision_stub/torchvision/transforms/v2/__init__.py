"""Imported by transformers/image_processing_utils.py, for its functional module."""
