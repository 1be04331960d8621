"""Which draft each request verifies."""
