"""Imported as a module by transformers/image_processing_utils.py; no name of it is read."""
