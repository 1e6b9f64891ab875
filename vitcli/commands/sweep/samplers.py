"""What Optuna is asked to do in a search: draw and prune."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitcli.commands.sweep.sections import SearchSection

if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


def make_sampler(search: SearchSection | None, number: int) -> BaseSampler:
    """Seeded by the entry's number, which no other machine and no resumed search has again."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = search.seed + 1000 * number if search and search.seed is not None else None
    if search and search.sampler == "tpe":
        return TPESampler(seed=seed, constant_liar=True)
    return RandomSampler(seed=seed)


def make_pruner(search: SearchSection | None) -> BasePruner:
    """The median rule, or none."""
    from optuna.pruners import MedianPruner, NopPruner

    if search is None or search.pruner is None:
        return NopPruner()
    return MedianPruner(search.pruner.startup_trials, search.pruner.warmup_steps)
