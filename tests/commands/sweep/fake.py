# ruff: noqa: PTH103, PTH110, PTH123, SIM115
"""Stands in for vitcli in the sweep tests: starts in milliseconds, logs that it ran, prints JSON.

    python -S fake.py LOG COMMAND [--option value]... --json

What it does is up to `--norm` or `--set name=`: `ok`, `crash`, `hang`, `garbage`, `silent`, `twice`
(prints two values), `nan` (a score that is no number), `slow` (a fifth of a second), `gate` (waits
until the file LOG.open is there), `meet` (until two have started), `suicide` (kill -9 the first
time it runs with these options), `once-hang` (hangs that time); with `orphan` in it, it leaves a
child behind, with `deaf` it notes a SIGTERM and goes on. A folder `--out` that is there is refused
without `--resume`. `prunable` waits to be ended where the
median of at least three that ended is better, as Optuna's median pruner would have it.
"""

import json
import os
import signal
import sys
import time


def main() -> int:
    log, command, *arguments = sys.argv[1:]
    options = dict(zip(arguments[::2], arguments[1::2], strict=False))
    words = " ".join(a for a in arguments if a != "--json")

    def note(what):
        with open(log, "a") as file:  # one short write: whole lines, whoever else appends
            file.write(f"{what} {command} {words}\n")

    note("start")
    out = options.get("--out")
    if out and os.path.exists(out) and "--resume" not in arguments:
        print("error: there is a run in this directory", file=sys.stderr)
        return 2
    if out:
        os.makedirs(out, exist_ok=True)
    named = [w.removeprefix("name=") for w in arguments if w.startswith("name=")]
    kind = named[0] if named else options.get("--norm", "ok")
    if kind == "crash":
        print("error: it broke", file=sys.stderr)
        return 1
    if kind == "slow":
        time.sleep(0.2)
    if "deaf" in kind:
        signal.signal(signal.SIGTERM, lambda *_: note("told"))
        note("deaf")
    while kind == "gate" and not os.path.exists(log + ".open"):
        time.sleep(0.01)
    while kind == "meet" and open(log).read().count("start ") < 2:
        time.sleep(0.01)
    is_first = open(log).read().count(f"start {command} {words}\n") == 1
    if "orphan" in kind and os.fork() == 0:
        time.sleep(600)
        os._exit(0)
    if "hang" in kind and (is_first or "once" not in kind):
        time.sleep(600)
    if "suicide" in kind and is_first:
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "garbage":
        print("epoch 1: loss 0.3")
        return 0
    if kind == "silent":
        return 0
    if kind == "twice":
        print("{}\n{}")
        return 0
    lr, seed = float(options.get("--lr", 0)), int(options.get("--seed", 0))
    if out:  # a training run that leaves its history, step by step
        with open(out + "/metrics.jsonl", "w") as file:
            for step in range(20):
                file.write(json.dumps({"step": step, "val_accuracy": 1 - abs(lr - 0.5)}) + "\n")
                file.flush()
                time.sleep(0.02)
    if kind == "prunable":
        ends = [line.split() for line in open(log) if line.startswith("end ")]
        values = sorted(1 - abs(float(w[w.index("--lr") + 1]) - 0.5) for w in ends)
        middle = len(values) // 2
        if len(values) >= 3 and 1 - abs(lr - 0.5) < (values[middle] + values[~middle]) / 2:
            time.sleep(60)
    score = [float("nan"), float("inf")][seed] if kind == "nan" else 1 - abs(lr - 0.5) + seed / 100
    history = [{"step": step, "loss": 1 / (step + 1)} for step in range(3)]
    result = {"score": score, "threads": os.environ["OMP_NUM_THREADS"]}
    print(json.dumps({"result": result, "history": history}), flush=True)
    note("end")  # after its result: what has ended is never run again
    return 0


if __name__ == "__main__":
    sys.exit(main())
