"""What the subcommands of `sglang-hvd` take and do."""
