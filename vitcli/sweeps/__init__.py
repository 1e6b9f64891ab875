"""Experiments as files: a space of trials, each its own process and directory. No torch."""
