"""Shared by all commands: options, the console, tables and figures."""
