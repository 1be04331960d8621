"""Warms the shared cache with texts while the server serves."""
