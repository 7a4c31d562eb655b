"""Checks and facts of this machine's hardware, for `dakrun doctor` and for headers of results."""
