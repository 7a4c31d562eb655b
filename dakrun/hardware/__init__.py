"""A machine in figures: profiles of bandwidths, rates and fixed costs, in TOML files."""
