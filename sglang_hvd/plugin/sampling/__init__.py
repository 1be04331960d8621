"""What a verification samples at each node: what plain serving samples after the same text."""
