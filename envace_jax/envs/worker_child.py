"""The loop of a worker process: one JSON line in, one JSON line out. `worker.py` starts it and holds the other end.

    PYTHON worker_child.py SCRIPT MEMORY_BYTES PARENT_PID

Only the standard library is imported here, because PYTHON is whichever interpreter has the benchmark's package; this
package is not installed there. SCRIPT is a file of plain functions, found by path:

    setup() -> Json                      once, before anything else: imports the package, checks its version
    open_episode(spec) -> episode        whatever the script keeps for an episode
    call(episode, name, arguments) -> Json
    state(episode) -> Json
    close_episode(episode) -> None
    ask(request) -> Json                 questions that need no episode, such as scoring

An exception of one of them is the answer `{"error": ...}`; one of `setup` ends the process. What the package prints
goes to stderr, so it cannot get between the answers.
"""

import sys

if __name__ == "__main__":
    sys.path.pop(0)  # this folder: a module of ours called calendar would hide the standard one

import ctypes
import importlib.util
import json
import os
import resource
import signal

OUT_OF_MEMORY = b'{"memory": true}\n'  # made beforehand: there may be no memory to make it when it is needed
PR_SET_PDEATHSIG = 1


def main() -> None:
    script, memory_bytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    end_with_parent(parent)
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    if memory_bytes:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        module = load(script)
        write(answers, {"answer": module.setup()})
    except Exception as error:
        write(answers, {"error": described(error)})
        return
    episodes: dict = {}
    for line in requests:
        try:
            answer = {"answer": perform(module, episodes, json.loads(line))}
            text = json.dumps(answer, allow_nan=False).encode() + b"\n"
        except MemoryError:
            write_bytes(answers, OUT_OF_MEMORY)
            os._exit(1)  # whatever else this process holds may be half done
        except Exception as error:
            text = json.dumps({"error": described(error)}).encode() + b"\n"
        write_bytes(answers, text)


def perform(module, episodes, request):
    """Does what one request says."""
    do, number = request["do"], request.get("episode")
    if do == "ask":
        return module.ask(request["request"])
    if do == "open":
        episodes[number] = module.open_episode(request["spec"])
        return None
    if do == "call":
        return module.call(episodes[number], request["name"], request["arguments"])
    if do == "state":
        return module.state(episodes[number])
    if do == "close":
        return module.close_episode(episodes.pop(number))
    raise ValueError(f"a worker cannot {do!r}")


def load(script):
    """The module of a file that is not on the path."""
    spec = importlib.util.spec_from_file_location("worker_script", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def described(error):
    """An exception in one line; what a script says in a RuntimeError is for people and stands alone."""
    text = " ".join(str(error).split())
    return text if type(error) is RuntimeError else f"{type(error).__name__}: {text}"


def end_with_parent(parent):
    """Lets the kernel kill this process with the thread that started it (elsewhere than on Linux, input just ends)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def write(answers, value):
    write_bytes(answers, json.dumps(value, allow_nan=False).encode() + b"\n")


def write_bytes(answers, text):
    while text:
        text = text[os.write(answers, text) :]


if __name__ == "__main__":
    main()
