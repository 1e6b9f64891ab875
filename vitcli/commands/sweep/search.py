"""A search: Optuna draws the points, and its storage says which process runs which of them.

Claiming takes three steps under the directory's claim lock: hold the locks of the point's trials,
move its entry in the study from WAITING to RUNNING (which one process alone can, whatever the
storage), and write down which directory it runs in. So

* a second process, on this machine or on another, cannot start a point that is claimed;
* a claim ends with its holder: a RUNNING entry of this directory whose locks are free was killed,
  and one of another directory is dead when its heartbeat stops (databases only);
* results live in the trials' directories: an entry is finished only after result.json is in place,
  and a claim on a trial whose result is already there is finished without running it.

An entry that failed without an `outcome` was given up and does not count. The storage is
a journal file beside the results, or a database of a kind that stores data and never objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import math
import re
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import FiniteFloat

from vitcli.commands.sweep import storage
from vitcli.commands.sweep.result import Counts, SweepTrial
from vitcli.commands.sweep.space import Choice, SearchSection
from vitcli.commands.sweep.spec import Sweep, Trial, repeats, trial_id
from vitcli.commands.sweep.storage import check_storage, journal_errors, masked_url, open_storage
from vitcli.commands.sweep.trials import Claim, Planned, Results, TrialDir
from vitcli.config.yaml import checked, lookup
from vitcli.errors import VitcliError, install_extra

if TYPE_CHECKING:
    import optuna
    from optuna.pruners import BasePruner
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial


_ID = re.compile(r"[0-9a-f]{12}")


def queue(sweep: Sweep, results: Results, retry_failed: bool = False) -> Planned | Search:
    """What gives out the trials of a sweep, one claim after the other.

    Raises:
        VitcliError: a search without Optuna, or a storage that cannot be opened.
    """
    kind = Search if sweep.search else Planned
    return kind(sweep, results, retry_failed)


def check_search(sweep: Sweep) -> None:
    """Refuse, before anything is made, a search that cannot run.

    Raises:
        VitcliError: Optuna is not installed, or the storage is of another kind.
    """
    if sweep.search and importlib.util.find_spec("optuna") is None:
        raise VitcliError("search: needs Optuna, which is not installed", install_extra("search"))
    if sweep.storage:
        check_storage(sweep.storage)


def study_name(sweep: Sweep) -> str:
    """The sweep's name, and what makes the values of two searches comparable."""
    search = sweep.search
    assert search
    axes = {
        key: list(axis.values) if isinstance(axis, Choice) else "range"
        for key, axis in sweep.space.items()
    }
    repeat = {key: list(seeds) for key, seeds in sweep.repeat.items()}
    same = [sweep.command, dict(sweep.base), repeat, axes]
    same += [sweep.configs] if sweep.configs else []
    text = json.dumps([*same, search.metric, search.direction], sort_keys=True)
    return f"{sweep.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def record_of(
    sweep: Sweep, trial: Trial, place: TrialDir, result: Mapping[str, Any]
) -> dict[str, Any]:
    """What an entry of the study keeps of a finished trial, for reports on other machines."""
    status, config = place.status(), place.config()
    return {
        "params": dict(trial.params),
        "metrics": {name: lookup(result, metric.path) for name, metric in sweep.metrics.items()},
        "wall_s": status.wall_s,
        "attempts": status.attempts,
        "host": status.host,
        "threads": status.threads,
        "command": config.run if config else "",
        "cwd": config.cwd if config else "",
    }


@dataclass(frozen=True)
class RemoteTrial:
    """What `record_of` wrote, read back."""

    params: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    wall_s: FiniteFloat | None = None
    attempts: int = 0
    host: str = ""
    threads: int | None = None
    command: str = ""
    cwd: str = ""


def remote_trials(sweep: Sweep, results: Results) -> dict[str, SweepTrial]:
    """Trials in the study that another directory holds: what their entries hold, by trial id.

    Raises:
        VitcliError: the storage cannot be read, or holds what no sweep has written.
    """
    import optuna

    assert sweep.storage
    opened = open_storage(sweep.storage, results.journal, reading=True)
    try:
        study = optuna.load_study(study_name=study_name(sweep), storage=opened)
        entries = study.get_trials(deepcopy=False)
    except KeyError:
        return {}
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        text = f"storage {masked_url(sweep.storage)}: is not the storage of a sweep ({reason})"
        raise VitcliError(text, "check the URL") from error
    found: dict[str, SweepTrial] = {}
    where = str(Path(masked_url(sweep.storage)))
    for entry in entries:
        attributes = entry.user_attrs
        state = {"COMPLETE": "done", "PRUNED": "pruned", "RUNNING": "running"}.get(entry.state.name)
        if entry.state.name == "FAIL" and "outcome" in attributes:
            state = "failed"
        known = attributes.get("told", [])  # the name in storages that exist
        for index, id in enumerate(_ids(entry) if state else []):
            record = known[index] if isinstance(known, list) and index < len(known) else {}
            of = checked(record, where, RemoteTrial, "name another --storage")
            found[id] = SweepTrial(
                id=id,
                state=state or "",
                params=of.params or attributes.get("params", {}),
                metrics=of.metrics,
                wall_s=of.wall_s,
                attempts=of.attempts,
                error=str(attributes.get("error", "")),
                command=of.command,
                cwd=of.cwd,
                directory="",
                host=of.host,
                threads=of.threads,
            )
    return found


def _ids(entry: FrozenTrial) -> list[str]:
    """The ids of an entry's trials.

    Raises:
        VitcliError: they are not ids; they name directories.
    """
    ids = entry.user_attrs.get("trials", [])
    if not isinstance(ids, list) or not all(isinstance(i, str) and _ID.fullmatch(i) for i in ids):
        raise VitcliError(
            f"study, trial {entry.number}: trials: is not a list of trial ids (got {ids!r})",
            "name another --out or --storage: something else has written to this one",
        )
    return ids


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

        self._states = optuna.trial.TrialState
        search = self.sweep.search
        assert search
        self._search = search
        self._place = self.results.id
        self._local = self.sweep.storage is None
        self._storage = open_storage(self.sweep.storage, self.results.journal)
        with self.results.claiming(), self._errors():
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=study_name(self.sweep),
                direction=search.direction,
                sampler=make_sampler(search, 0),
                pruner=make_pruner(search),
                load_if_exists=True,
            )
            self._void = {t.number for t in self._entries() if self._outdated(t)}
        self._beat_at = 0.0

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        with journal_errors(self.results.journal) if self._local else contextlib.nullcontext():
            yield

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
        value = statistics.fmean(numbers)
        if not self._local:  # a report on another machine has nothing else to read
            ended = zip(claim.trials, results, strict=True)
            records = [
                record_of(self.sweep, trial, place, result) for (trial, place, _), result in ended
            ]
            self._attribute(claim, "told", records)
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
        """The state of the whole search, on every machine, in points."""
        states = [entry.state for id, same in self._meanings().items() if id for entry in same]
        return Counts(
            done=states.count(self._states.COMPLETE),
            running=states.count(self._states.RUNNING),
            failed=states.count(self._states.FAIL),
            pruned=states.count(self._states.PRUNED),
            total=self._search.trials,
        )

    def beat(self, claims: Sequence[Claim]) -> None:
        """Report to a database storage, now and then, that these trials are alive."""
        if time.monotonic() < self._beat_at:
            return
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
        return not all(self.results.trial(id).has_result() for id in _ids(entry))

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
            return not any(self.results.trial(id).is_held() for id in _ids(entry))
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
        import optuna

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
        if before >= search.trials:
            self._study.tell(live, state=optuna.trial.TrialState.FAIL)
            return None
        point = {**self.sweep.base, **live.params}
        trials = repeats(self.sweep, live.params)
        entry = self._storage.get_trial(live._trial_id)
        claim = self._take(entry, trials, trial_id(self.sweep.command, point), live)
        if claim is None:  # the same point is running in another process
            self._study.tell(live, state=optuna.trial.TrialState.FAIL)
        return claim

    def _take(
        self,
        entry: FrozenTrial,
        trials: Sequence[Trial],
        id: str,
        live: optuna.Trial,
    ) -> Claim | None:
        """Hold the trials' locks and mark the entry as running here; None if another was first."""
        claim = Claim(id, [], entry.number, entry._trial_id, live)
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
        self._attribute(claim, "params", dict(trials[0].params))
        self._attribute(claim, "id", claim.id)
        if "fixed_params" not in entry.system_attrs:  # drawn now, not a point that is tried again
            first = claim.trials[0][1]
            status = first.as_left()
            first.write_status(replace(status, drawn=status.drawn + 1))
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
