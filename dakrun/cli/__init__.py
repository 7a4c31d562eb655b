"""The `dakrun` command: options, error lines, exit codes; every command's work is done below it."""
