"""Which trial is next, agreed with every other process that runs the same sweep.

The study says who runs what. Claiming takes three steps under the directory's claim lock: hold the
trial's own lock, move its entry in the study from WAITING to RUNNING (which one process alone can,
whatever the storage), and write down which directory it runs in. So

* a second process, on this machine or on another, cannot start a trial that is claimed;
* a claim ends with its holder: a RUNNING trial of this directory whose lock is free was killed, and
  one of another directory is dead when its heartbeat stops (database storages only);
* results live in the trials' directories: an entry is finished only after result.json is in place,
  and a claim on a trial whose result is already there is finished without running it.

An entry that failed without an `outcome` was given up and says nothing of its trial.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vitcli.commands.sweep.space import SearchSection
from vitcli.commands.sweep.spec import Sweep, Trial, expand, repeats, trial_id
from vitcli.commands.sweep.storage import GRACE_S, HEARTBEAT_S, open_storage, study_name, tell
from vitcli.commands.sweep.trialdir import Results, TrialDir, lookup
from vitcli.files import Lock

if TYPE_CHECKING:
    import optuna
    from optuna.trial import FrozenTrial
if TYPE_CHECKING:
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler


@dataclass
class Claim:
    """Trials this process alone may run: one, or the seeds of one point of a search."""

    id: str
    number: int
    key: int
    """The storage's own key of the entry."""
    trials: list[tuple[Trial, TrialDir, Lock]]
    """Each with its directory and its lock."""
    live: optuna.Trial | None = None
    """The entry as a search reports to it."""

    def release(self) -> None:
        for _, _, lock in self.trials:
            lock.close()
        self.trials = []


@dataclass(frozen=True)
class Counts:
    """Trials of a sweep by how they stand."""

    done: int
    running: int
    failed: int
    pruned: int
    total: int

    @property
    def left(self) -> int:
        return max(0, self.total - self.done - self.failed - self.pruned)


@dataclass
class Study:
    """The study of one sweep, as this process sees it."""

    sweep: Sweep
    results: Results
    retry_failed: bool = False
    planned: list[Trial] = field(init=False)
    _given_up: set[str] = field(init=False, default_factory=set)
    """Trials that something killed while this process ran them: for the next call to try."""

    def __post_init__(self) -> None:
        import optuna

        self._states = optuna.trial.TrialState
        self.planned = expand(self.sweep)
        self._place = self.results.id
        self._local = self.sweep.storage is None
        self._storage = open_storage(self.sweep.storage, self.results.journal)
        search = self.sweep.search
        with self.results.claiming():
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=study_name(self.sweep),
                direction=search.direction if search else "minimize",
                sampler=make_sampler(search, 0),
                pruner=make_pruner(search),
                load_if_exists=True,
            )
            self._void = {t.number for t in self._entries() if self._outdated(t)}
        self._beat_at = 0.0

    def claim(self) -> Claim | None:
        """The next trial for this process, or None where all are finished or claimed."""
        import optuna

        with self.results.claiming():
            optuna.storages.fail_stale_trials(self._study)
            self._bury_dead()
            return self._claim_drawn() if self.sweep.search else self._claim_planned()

    def finish(self, claim: Claim, results: Sequence[Mapping[str, Any]]) -> str:
        """Enter a claim whose trials are all done; says why where there is no value to enter."""
        path = self.sweep.metrics.get(self.sweep.objective, "")
        values = [lookup(result, path) if path else None for result in results]
        numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if self.sweep.search and len(numbers) < len(values):
            error = f"the result has no number at {path}"
            self.fail(claim, error)
            return error
        value = statistics.fmean(numbers) if numbers else 0.0
        if not self._local:  # a report on another machine has nothing else to read
            ended = zip(claim.trials, results, strict=True)
            told = [tell(self.sweep, trial, place, result) for (trial, place, _), result in ended]
            self._attribute(claim, "told", told)
        self._end(claim, self._states.COMPLETE, [value])
        return ""

    def fail(self, claim: Claim, error: str) -> None:
        self._attribute(claim, "outcome", "failed")
        self._attribute(claim, "error", error)
        self._end(claim, self._states.FAIL, None)

    def prune(self, claim: Claim) -> None:
        """Enter a pruned trial with its last value, if any, as Optuna does."""
        seen = self._storage.get_trial(claim.key).intermediate_values
        last = [seen[max(seen)]] if seen else None
        self._end(claim, self._states.PRUNED, last)

    def give_up(self, claim: Claim, *, again: bool) -> None:
        """Let go of a claim that came to nothing: others may run it, and `again` this process."""
        if not again:
            self._given_up.add(claim.id)
        self._end(claim, self._states.FAIL, None)

    def counts(self) -> Counts:
        """How the whole sweep stands, on every machine; of a search, in points."""
        search = self.sweep.search
        known = self._meanings()
        if search:
            entries = [entry for id, same in known.items() if id for entry in same]
        else:
            entries = [known[trial.id][-1] for trial in self.planned if trial.id in known]
        states = [entry.state for entry in entries]
        return Counts(
            done=states.count(self._states.COMPLETE),
            running=states.count(self._states.RUNNING),
            failed=states.count(self._states.FAIL),
            pruned=states.count(self._states.PRUNED),
            total=search.trials if search else len(self.planned),
        )

    def beat(self, claims: Sequence[Claim]) -> None:
        """Tell a database storage, now and then, that these trials are alive."""
        if time.monotonic() < self._beat_at:
            return
        self._beat_at = time.monotonic() + HEARTBEAT_S / 3
        for claim in claims:
            self._beat(claim)

    def _beat(self, claim: Claim) -> None:
        if record := getattr(self._storage, "record_heartbeat", None):
            record(claim.key)

    # -- the entries -------------------------------------------------------------------------

    def _entries(self) -> list[FrozenTrial]:
        return self._study.get_trials(deepcopy=False)

    def _outdated(self, entry: FrozenTrial) -> bool:
        """Finished entries that this call does not accept: lost results, failures to retry."""
        if entry.state == self._states.FAIL:
            return self.retry_failed
        ours = entry.user_attrs.get("results") == self._place
        if entry.state != self._states.COMPLETE or not ours:
            return False
        ids = entry.user_attrs.get("trials", [])
        return any(self.results.trial(id).result() is None for id in ids)

    def _says_nothing(self, entry: FrozenTrial) -> bool:
        given_up = entry.state == self._states.FAIL and "outcome" not in entry.user_attrs
        return given_up or entry.number in self._void

    def _bury_dead(self) -> None:
        for entry in self._entries():
            if entry.state == self._states.RUNNING and self._is_dead(entry):
                with contextlib.suppress(RuntimeError):  # another machine was first
                    self._storage.set_trial_state_values(entry._trial_id, self._states.FAIL)

    def _is_dead(self, entry: FrozenTrial) -> bool:
        place = entry.user_attrs.get("results")
        if place == self._place:
            ids = entry.user_attrs["trials"]
            return not any(self.results.trial(id).is_held() for id in ids)
        if place is None and self._local:  # the claim lock is ours: nobody else is claiming
            return True
        started = entry.datetime_start
        return place is None and started is not None and time.time() - started.timestamp() > GRACE_S

    def _meanings(self) -> dict[str, list[FrozenTrial]]:
        """The entries that say something of a trial, by the trial's id, oldest first."""
        found: dict[str, list[FrozenTrial]] = {}
        for entry in self._entries():
            if not self._says_nothing(entry):
                found.setdefault(entry.user_attrs.get("id", ""), []).append(entry)
        return found

    # -- claiming ----------------------------------------------------------------------------

    def _claim_planned(self) -> Claim | None:
        known = self._meanings()
        missing = [t for t in self.planned if t.id not in known and t.id not in self._given_up]
        for trial in missing:
            self._study.enqueue_trial({}, user_attrs={"id": trial.id, "params": dict(trial.params)})
        if missing:
            known = self._meanings()  # another machine may have entered the same: the oldest counts
        for trial in self.planned:
            entries = known.get(trial.id, [])
            free = entries and all(e.state == self._states.WAITING for e in entries)
            if free and (claim := self._take(entries[0], [trial])):
                return claim
        return None

    def _claim_drawn(self) -> Claim | None:
        import optuna

        search = self.sweep.search
        assert search
        known = self._meanings()
        room = search.trials - sum(map(len, known.values()))
        for entry in self._entries():  # points whose claim came to nothing wait for another
            id = entry.user_attrs.get("id", "")
            if room > 0 and self._says_nothing(entry) and id not in {"", *known, *self._given_up}:
                attributes = {"id": id, "params": entry.user_attrs["params"]}
                self._study.enqueue_trial(entry.params, user_attrs=attributes)
                known[id] = [entry]
                room -= 1
        entries = [e for e in self._entries() if not self._says_nothing(e)]
        waiting = any(e.state == self._states.WAITING for e in entries)
        if not waiting and len(entries) >= search.trials:
            return None
        live = self._study.ask()
        self._study.sampler = make_sampler(search, live.number)
        for key in sorted(self.sweep.space):
            self.sweep.space[key].suggest(live, key)
        # Two machines may both see room for one more: the older entry has it.
        before = sum(not self._says_nothing(e) for e in self._entries() if e.number < live.number)
        if before >= search.trials:
            self._study.tell(live, state=optuna.trial.TrialState.FAIL)
            return None
        point = {**self.sweep.base, **live.params}
        trials = repeats(self.sweep, live.params)
        entry = self._storage.get_trial(live._trial_id)
        claim = self._take(entry, trials, trial_id(self.sweep.command, point), live)
        if claim is None:  # the same point is running elsewhere
            self._study.tell(live, state=optuna.trial.TrialState.FAIL)
        return claim

    def _take(
        self,
        entry: FrozenTrial,
        trials: Sequence[Trial],
        id: str | None = None,
        live: optuna.Trial | None = None,
    ) -> Claim | None:
        """Hold the trials' locks and mark the entry as running here; None if another was first."""
        claim = Claim(id or trials[0].id, entry.number, entry._trial_id, [], live)
        for trial in trials:
            place = self.results.trial(trial.id)
            lock = place.try_lock()
            if lock is None:
                claim.release()
                return None
            claim.trials.append((trial, place, lock))
        if entry.state == self._states.WAITING:
            won = False
            with contextlib.suppress(RuntimeError):  # another machine has already finished it
                won = self._storage.set_trial_state_values(claim.key, self._states.RUNNING)
            if not won:
                claim.release()
                return None
        self._beat(claim)  # before it says whose it is: from then on silence is death
        self._attribute(claim, "trials", [trial.id for trial in trials])
        self._attribute(claim, "results", self._place)
        if live:
            self._attribute(claim, "params", dict(trials[0].params))
            self._attribute(claim, "id", claim.id)
        return claim

    def _attribute(self, claim: Claim, name: str, value: Any) -> None:
        self._storage.set_trial_user_attr(claim.key, name, value)

    def _end(self, claim: Claim, state: Any, values: list[float] | None) -> None:
        with contextlib.suppress(RuntimeError):  # taken for dead and already given up
            self._storage.set_trial_state_values(claim.key, state, values)
        claim.release()


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
