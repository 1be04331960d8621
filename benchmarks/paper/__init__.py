"""The paper's evaluation, repeated with one command."""
