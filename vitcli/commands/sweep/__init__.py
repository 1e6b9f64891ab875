"""How does the answer change with the config? Trials of a YAML file, each its own process."""
