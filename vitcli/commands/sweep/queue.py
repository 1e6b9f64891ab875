"""Who runs which trial next: `Planned` knows them in advance, for `Search` Optuna draws them.

Claiming a point of a search takes three steps under the directory's claim lock: hold the locks of
its trials, move its entry in the study from WAITING to RUNNING (which one process alone can,
whatever the storage), and write down which directory it runs in. So

* a second process, on this machine or on another, cannot start a point that is claimed;
* a claim ends with its holder: a RUNNING entry of this directory whose locks are free was killed,
  and one of another directory is dead when its heartbeat stops (databases only);
* results live in the trials' directories: an entry is finished only after result.json is in place,
  and a claim on a trial whose result is already there is finished without running it.

An entry that failed without an `outcome` was given up and does not count.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from vitcli.commands.sweep import storage
from vitcli.commands.sweep.result import Counts, State, Status
from vitcli.commands.sweep.space import SearchSection
from vitcli.commands.sweep.spec import Sweep
from vitcli.commands.sweep.storage import (
    STATES,
    journal_errors,
    open_storage,
    study_name,
    trial_ids,
)
from vitcli.commands.sweep.trials import (
    Results,
    Trial,
    TrialDir,
    expand,
    read_trial,
    repeats,
    trial_id,
)
from vitcli.config.yaml import lookup
from vitcli.files import Lock

if TYPE_CHECKING:
    import optuna
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


@dataclass
class Claim:
    """Trials this process alone may run: one, or the seeds of one point of a search."""

    id: str
    trials: list[tuple[Trial, TrialDir, Lock]]
    """Each with its directory and its lock."""
    key: int = 0
    """Of a search: the storage's own key of the entry."""
    live: optuna.Trial | None = None
    """The entry as a search reports to it."""

    def release(self) -> None:
        for _, _, held in self.trials:
            held.close()
        self.trials = []


@dataclass
class Planned:
    """The trials of a grid, a list or of random draws, claimed by the locks in their directories.

    `claim` gives out each trial that has not ended and that nobody else runs. What has ended is
    read from the directories alone, so nothing needs to be entered anywhere when a trial ends.
    """

    sweep: Sweep
    results: Results
    retry_failed: bool = False
    planned: list[Trial] = field(init=False)
    _ended: dict[str, State] = field(init=False, default_factory=dict)
    """Trials that are known to be over."""
    _given_up: set[str] = field(init=False, default_factory=set)
    """Trials that something killed while this process ran them: for the next call to try."""
    _retry: dict[str, int] = field(init=False, default_factory=dict)
    """Trials that had failed when this call began, and after how many attempts."""

    def __post_init__(self) -> None:
        self.planned = expand(self.sweep)
        if self.retry_failed:
            for trial in self.planned:
                status = self.results.trial(trial.id).status()
                if status.state == "failed":
                    self._retry[trial.id] = status.attempts

    def claim(self) -> Claim | None:
        """The next trial for this process, or None where all have ended or are claimed."""
        for trial in self.planned:
            if trial.id in self._ended or trial.id in self._given_up:
                continue
            place = self.results.trial(trial.id)
            held = None if place.is_held() else place.try_lock()
            if held is None:
                continue
            try:
                state = self._outcome(trial.id, place.as_left(), place)
            except BaseException:
                held.close()
                raise
            if state is None:
                return Claim(trial.id, [(trial, place, held)])
            self._ended[trial.id] = state
            held.close()
        return None

    def _outcome(self, id: str, status: Status, place: TrialDir) -> State | None:
        """How a trial has ended, if it has and is not to be run again."""
        if status.state == "done":
            return "done" if place.has_result() else None
        if status.state == "failed" and self._retry.get(id) == status.attempts:
            return None
        return status.state if status.state in ("failed", "pruned") else None

    def finish(self, claim: Claim, results: Sequence[Mapping[str, Any]]) -> str:
        return self._end(claim, "done")

    def fail(self, claim: Claim, error: str) -> None:
        self._end(claim, "failed")

    def prune(self, claim: Claim) -> None:
        self._end(claim, "pruned")

    def _end(self, claim: Claim, state: State) -> str:
        self._ended[claim.id] = state
        claim.release()
        return ""

    def give_up(self, claim: Claim, *, again: bool) -> None:
        """Let go of a claim that came to nothing: others may run it, and `again` this process."""
        if not again:
            self._given_up.add(claim.id)
        claim.release()

    def beat(self, claims: Sequence[Claim]) -> None:
        """Nothing: a lock that is held says that its holder lives."""

    def counts(self) -> Counts:
        """The state of the whole sweep, in every process that runs it."""
        folder = self.results.root / "trials"
        there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        begun = (t.id for t in self.planned if t.id in self._ended or t.id in there)
        return Counts.of(map(self._state, begun), len(self.planned))

    def _state(self, id: str) -> State | None:
        """How a trial has ended, which is read once, for it stays so; or whether it runs."""
        if id not in self._ended:
            place = self.results.trial(id)
            status = place.status()
            if status.state == "running":
                return "running" if place.is_held() else None
            state = self._outcome(id, status, place)
            if state is None:
                return None
            self._ended[id] = state
        return self._ended[id]


RECORDED = ("params", "metrics", "wall_s", "attempts", "host", "threads", "command", "cwd")
"""What an entry of a database keeps of each finished trial, for reports on other machines."""


@dataclass
class Search:
    """The study of one search, as this process sees it."""

    sweep: Sweep
    results: Results
    retry_failed: bool = False
    _given_up: set[str] = field(init=False, default_factory=set)
    """Trials that something killed while this process ran them: for the next call to try."""

    def __post_init__(self) -> None:
        import optuna
        from optuna.pruners import MedianPruner, NopPruner

        assert self.sweep.search
        self._search = search = self.sweep.search
        self._states = optuna.trial.TrialState
        self._place = self.results.id
        self._local = self.sweep.storage is None
        self._storage = open_storage(self.sweep.storage, self.results.journal)
        self._errors: Any = contextlib.nullcontext
        if self._local:
            self._errors = functools.partial(journal_errors, self.results.journal)
        pruner = (
            NopPruner()
            if search.pruner is None
            else MedianPruner(search.pruner.startup_trials, search.pruner.warmup_steps)
        )
        with self.results.claiming(), self._errors():
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=study_name(self.sweep),
                direction=search.direction,
                sampler=make_sampler(search, 0),
                pruner=pruner,
                load_if_exists=True,
            )
            self._void = {t.number for t in self._entries() if self._outdated(t)}
        self._beat_at = 0.0

    def claim(self) -> Claim | None:
        """The next point for this process, or None where all are finished or claimed."""
        import optuna

        with self.results.claiming(), self._errors():
            optuna.storages.fail_stale_trials(self._study)
            self._bury_dead()
            return self._claim_drawn()

    def finish(self, claim: Claim, results: Sequence[Mapping[str, Any]]) -> str:
        """Enter a claim whose trials are all done; says why where there is no value to enter."""
        path = self.sweep.metrics[self.sweep.objective].path
        values = [lookup(result, path) for result in results]
        numbers = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if len(numbers) < len(values):
            error = f"the result has no number at {path}"
            self.fail(claim, error)
            return error
        if not self._local:  # a report on another machine has nothing else to read
            ended = [read_trial(self.sweep, place) for _, place, _ in claim.trials]
            records = [{name: getattr(trial, name) for name in RECORDED} for trial in ended]
            self._attribute(claim, "told", records)
        self._end(claim, self._states.COMPLETE, [statistics.fmean(numbers)])
        return ""

    def fail(self, claim: Claim, error: str) -> None:
        self._attribute(claim, "outcome", "failed")
        self._attribute(claim, "error", error)
        self._end(claim, self._states.FAIL, None)

    def prune(self, claim: Claim) -> None:
        """Enter a pruned trial with its last value, if any, as Optuna does."""
        seen = self._storage.get_trial(claim.key).intermediate_values
        self._end(claim, self._states.PRUNED, [seen[max(seen)]] if seen else None)

    def give_up(self, claim: Claim, *, again: bool) -> None:
        """Let go of a claim that came to nothing: others may run it, and `again` this process."""
        if not again:
            self._given_up.add(claim.id)
        self._end(claim, self._states.FAIL, None)

    def counts(self) -> Counts:
        """The state of the whole search, on every machine, in points."""
        entries = [entry for id, same in self._meanings().items() if id for entry in same]
        return Counts.of((STATES.get(e.state.name) for e in entries), self._search.trials)

    def beat(self, claims: Sequence[Claim]) -> None:
        """Report to a database storage, now and then, that these trials are alive."""
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + storage.HEARTBEAT_S / 3
            for claim in claims:
                self._beat(claim)

    def _beat(self, claim: Claim) -> None:
        if record := getattr(self._storage, "record_heartbeat", None):
            record(claim.key)

    # -- the entries -------------------------------------------------------------------------

    def _entries(self) -> list[FrozenTrial]:
        with self._errors():
            return self._study.get_trials(deepcopy=False)

    def _outdated(self, entry: FrozenTrial) -> bool:
        """Finished entries that this call does not accept: lost results, failures to retry."""
        if entry.state == self._states.FAIL:
            return self.retry_failed
        ours = entry.user_attrs.get("results") == self._place
        if entry.state != self._states.COMPLETE or not ours:
            return False
        return not all(self.results.trial(id).has_result() for id in trial_ids(entry))

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
            return not any(self.results.trial(id).is_held() for id in trial_ids(entry))
        if place is None and self._local:  # the claim lock is ours: nobody else is claiming
            return True
        started = entry.datetime_start
        if place is not None or started is None:
            return False
        return time.time() - started.timestamp() > storage.GRACE_S

    def _meanings(self) -> dict[str, list[FrozenTrial]]:
        """The entries that say something of a trial, by the trial's id, oldest first."""
        found: dict[str, list[FrozenTrial]] = {}
        for entry in self._entries():
            if not self._says_nothing(entry):
                found.setdefault(entry.user_attrs.get("id", ""), []).append(entry)
        return found

    # -- claiming ----------------------------------------------------------------------------

    def _claim_drawn(self) -> Claim | None:
        search = self._search
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
        claim = self._take(live) if before < search.trials else None
        if claim is None:
            self._study.tell(live, state=self._states.FAIL)
        return claim

    def _take(self, live: optuna.Trial) -> Claim | None:
        """Hold the locks of the point's trials and mark its entry as running here.

        None where the same point runs in another process, or another machine was first.
        """
        entry = self._storage.get_trial(live._trial_id)
        point = {**self.sweep.base, **live.params}
        claim = Claim(trial_id(self.sweep.command, point), [], live._trial_id, live)
        for trial in repeats(self.sweep, live.params):
            place = self.results.trial(trial.id)
            held = place.try_lock()
            if held is None:
                claim.release()
                return None
            claim.trials.append((trial, place, held))
        if entry.state == self._states.WAITING:
            won = False
            with contextlib.suppress(RuntimeError):  # another machine has already finished it
                won = self._storage.set_trial_state_values(claim.key, self._states.RUNNING)
            if not won:
                claim.release()
                return None
        self._beat(claim)  # before it says whose it is: from then on silence is death
        first, place, _ = claim.trials[0]
        self._attribute(claim, "trials", [trial.id for trial, _, _ in claim.trials])
        self._attribute(claim, "results", self._place)
        self._attribute(claim, "params", dict(first.params))
        self._attribute(claim, "id", claim.id)
        if "fixed_params" not in entry.system_attrs:  # drawn now, not a point that is tried again
            status = place.as_left()
            place.write_status(replace(status, drawn=status.drawn + 1))
        return claim

    def _attribute(self, claim: Claim, name: str, value: Any) -> None:
        self._storage.set_trial_user_attr(claim.key, name, value)

    def _end(self, claim: Claim, state: Any, values: list[float] | None) -> None:
        with contextlib.suppress(RuntimeError):  # taken for dead and already given up
            self._storage.set_trial_state_values(claim.key, state, values)
        claim.release()


def make_sampler(search: SearchSection, number: int) -> BaseSampler:
    """Seeded by the entry's number, which no other machine and no resumed search has again."""
    from optuna.samplers import RandomSampler, TPESampler

    seed = None if search.seed is None else search.seed + 1000 * number
    if search.sampler == "tpe":
        return TPESampler(seed=seed, constant_liar=True)
    return RandomSampler(seed=seed)
