"""The encoder: torch and nothing else."""
