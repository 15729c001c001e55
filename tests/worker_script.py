"""What the children of test_worker.py run: counters, with ways to be slow, greedy, noisy or broken."""

import os
import signal
import sys
import time

hoard = []


def setup():
    if os.environ.get("BROKEN"):
        raise RuntimeError("the package is missing: pip install it")
    print("noise on stdout at the start")
    return {"pid": os.getpid(), "variables": sorted(os.environ), "path": sys.path}


def open_episode(spec):
    return {"total": spec["start"], "order": []}


def call(episode, name, arguments):
    if name == "add":
        print("noise on stdout", flush=True)
        episode["total"] += arguments["number"]
        episode["order"].append(arguments["number"])
        return {"total": episode["total"], "pid": None if "quiet" in arguments else os.getpid()}
    if name == "sleep":
        if "note" in arguments:
            with open(arguments["note"], "a") as file:
                file.write("asleep\n")
        time.sleep(arguments["seconds"])
        return {"slept": arguments["seconds"]}
    if name == "allocate":
        return {"bytes": len(bytearray(arguments["bytes"]))}
    if name == "hoard":
        hoard.append(bytearray(arguments["bytes"]))
        return {"kept": len(hoard)}
    if name == "die":
        sys.stderr.write("last words\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "echo":
        return arguments
    if name == "nan":
        return float("nan")
    if name == "once":  # another result each time
        return {"time": time.time_ns()}
    raise KeyError(name)


def state(episode):
    return dict(episode)


def close_episode(episode):
    hoard.append(("closed", episode["total"]))


def ask(request):
    if request == "closed":
        return [entry[1] for entry in hoard if isinstance(entry, tuple)]
    return {"pid": os.getpid(), "double": 2 * request}
