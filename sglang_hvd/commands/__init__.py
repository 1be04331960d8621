"""The subcommands of `sglang-hvd`: their arguments, and what they call."""
