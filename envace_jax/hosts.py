"""One run as several processes: how they find each other, how arrays get onto all their devices, what they tell.

Every process runs the same program in step and enters every call here at the same point. With one process, which starts
nothing, each is a plain local function. Knows devices and bytes; no task, policy or file. What becomes of a run that
loses a process is `watch.py`'s business.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import pickle
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from envace_jax.config import ConfigError, UserError
from envace_jax.watch import LastWords

FLAGS_HELP = """On a TPU pod and under SLURM the same command on every host is one run. Elsewhere say of each process:
  --coordinator=HOST:PORT  process 0's host, and a free port there
  --processes=N            how many processes there are
  --process=I              which one this is, 0 to N - 1"""
START_TIMEOUT_S = 300  # the hosts of a pod are not all up at the same moment
# jax's own heartbeats end a process without a word, so they are only a second net below those of `watch.py`.
JAX_HEARTBEAT_S = 300
# Messages travel in arrays of few sizes, so that few programs are compiled for them: the first holds most.
FIRST_BYTES, NEXT_BYTES, GROWTH = 4096, 1 << 16, 8
HEADER_BYTES = 16  # the sender's number and the message's length


@dataclasses.dataclass(frozen=True)
class Launch:
    """What the flags say of the run's processes."""

    coordinator: str
    processes: int
    process: int


# --- starting ---


def read_flags(arguments: Sequence[str]) -> tuple[Launch | None, list[str]]:
    """What the command line says of processes (None: nothing), and the line without it. Raises ConfigError."""
    values = flags.FlagValues()
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.", values)
    flags.DEFINE_integer("processes", None, "How many processes there are.", flag_values=values)
    flags.DEFINE_integer("process", None, "Which one this is.", flag_values=values)
    try:
        rest = values(list(arguments), known_only=True)
    except flags.Error as error:
        raise ConfigError(str(error).splitlines()[0]) from error
    given: dict[str, Any] = {name: values[name].value for name in ("coordinator", "processes", "process")}
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return None, rest
    if missing:
        raise ConfigError(f"{' and '.join(missing)} missing: --coordinator, --processes and --process go together")
    launch = Launch(**given)
    host, _, port = launch.coordinator.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"--coordinator={launch.coordinator}: expected HOST:PORT, as in 10.0.0.2:8476")
    if launch.processes < 1:
        raise ConfigError(f"--processes={launch.processes}: expected a number of processes, at least 1")
    if not 0 <= launch.process < launch.processes:
        raise ConfigError(f"--process={launch.process}: expected 0 to {launch.processes - 1} (--processes - 1)")
    return launch, rest


def start(launch: Launch | None) -> None:
    """Joins the run's other processes, by the flags or by what the environment says; a lone process joins nobody.

    Nothing may have touched a device before. Raises UserError where the others are not found.
    """
    if launch is None and not _several_around():
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # A CPU runs programs that do not depend on one another side by side. Their collectives would meet in another order
    # in each process, and wait for ever; other devices run one program after the other.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    # Within a program too threads come to collectives as they please; with a single one they rarely meet otherwise.
    os.environ.setdefault("PJRT_NPROC", "1")
    jax.config.update("jax_enable_preemption_service", False)  # SIGTERM is `stopping.py`'s business
    named: dict[str, Any] = {}
    if launch is not None:
        named = {
            "coordinator_address": launch.coordinator, "num_processes": launch.processes, "process_id": launch.process,
            "cluster_detection_method": "deactivate",
        }  # fmt: skip
    who = "the processes" if launch is None else f"process {launch.process} and the other {launch.processes - 1}"
    where = "" if launch is None else f" ({launch.coordinator})"
    # jax aborts where not all come in time.
    words = LastWords(
        f"error: {who} of the run did not come together within {START_TIMEOUT_S} s; start all of them, where they can "
        f"reach process 0{where}"
    )
    try:
        jax.distributed.initialize(
            **named, initialization_timeout=START_TIMEOUT_S, heartbeat_timeout_seconds=JAX_HEARTBEAT_S
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"{who} of the run did not come together{where}: {_first_line(error)}") from error
    finally:
        words.close()


def _several_around() -> bool:
    """Whether the environment (a TPU pod, SLURM, Open MPI, Kubernetes) says that this process is one of several."""
    from jax._src.clusters import ClusterEnv  # what `jax.distributed.initialize` asks; it has no public name

    try:
        found = next(
            (env for env in ClusterEnv._cluster_types if not env.opt_in_only_method and env.is_env_present()), None
        )
        return found is not None and found.get_process_count() > 1
    except Exception as error:  # asks a metadata server or Kubernetes, which need not answer
        print(f"alone, as the environment names no other process: {_first_line(error)}", file=sys.stderr, flush=True)
        return False


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:300]


# --- who ---


def started() -> bool:
    """Whether this process has joined others."""
    return jax.distributed.is_initialized()


def count() -> int:
    return jax.process_count()


def index() -> int:
    return jax.process_index()


def index_or_0() -> int:
    """`index` where there is one: before the start, and where there are no devices, there is none."""
    try:
        return jax.process_index() if started() else 0
    except RuntimeError:
        return 0


def first() -> bool:
    """Whether this is the process that writes the run's files and speaks for it."""
    return jax.process_index() == 0


def owns(number: int) -> bool:
    """Whether share `number` of some work is this process's: shares are dealt in turn."""
    return number % jax.process_count() == jax.process_index()


@contextlib.contextmanager
def only_first_speaks() -> Iterator[None]:
    """What other processes than the first print on stdout is dropped."""
    if first():
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield


# --- arrays ---


def put(values: Any, sharding: Sharding | None) -> Any:
    """Puts a pytree of numpy arrays, the same in every process, on the devices: each process those parts that its own
    devices hold."""
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(values, sharding)
    return jax.tree.map(lambda x: _put_parts(np.asarray(x), sharding), values)


def _put_parts(array: np.ndarray, sharding: Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda part: np.asarray(array[part]))


# --- words ---


def exchange(value: Any) -> list[Any]:
    """What every process gave, in their order: a collective. Values are pickled: the processes of a run trust each
    other."""
    if jax.process_count() == 1:
        return [value]
    message = pickle.dumps(value)
    header = np.array([jax.process_index(), len(message)], np.int64).tobytes()
    begun = FIRST_BYTES - HEADER_BYTES
    found: dict[int, tuple[int, bytes]] = {}
    rows = []
    for row in _gather(header + message[:begun], FIRST_BYTES):
        sender, length = np.frombuffer(row[:HEADER_BYTES], np.int64).tolist()
        found[sender] = (length, row[HEADER_BYTES:])
        rows.append(sender)
    longest = max(length for length, _ in found.values()) - begun
    if longest > 0:
        size = NEXT_BYTES
        while size < longest:
            size *= GROWTH
        for sender, row in zip(rows, _gather(message[begun:], size), strict=True):
            length, beginning = found[sender]
            found[sender] = (length, beginning + row)
    return [pickle.loads(data[:length]) for _, (length, data) in sorted(found.items())]


def total(counts: Mapping[str, int]) -> dict[str, int]:
    """Counts by name, summed over the processes: a collective."""
    if jax.process_count() == 1:
        return dict(counts)
    added: collections.Counter[str] = collections.Counter()
    for theirs in exchange(dict(counts)):
        added.update(theirs)
    return dict(added)


def _gather(data: bytes, size: int) -> list[bytes]:
    """`size` bytes of every process, padded with zeros, in the order of devices."""
    padded = np.zeros(size, np.uint8)
    padded[: len(data)] = np.frombuffer(data, np.uint8)
    return [row.tobytes() for row in multihost_utils.process_allgather(padded)]
