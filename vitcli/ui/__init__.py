"""Shared by all commands: options, the console, tables, figures and JSON."""
