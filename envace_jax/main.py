"""The training command: reads the configuration, prepares the devices and the work folder, and starts the run.

    python -m envace_jax.main --config=configs/tiny.py [--workdir=FOLDER] [--config.KEY=VALUE ...]

The same command continues a run that was interrupted; Ctrl-C says from which step, and SIGTERM ends it in order after
its step. Started on every host it is one run (docs/hosts.md). It knows no part of the method. Bad input is answered by
lines on stderr and exit code 2, without a traceback.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import jax
from absl import flags
from jax.sharding import Mesh
from ml_collections import config_dict, config_flags

from envace_jax import hosts, stopping, watch, workfolder
from envace_jax.answers import own_file
from envace_jax.config import (
    ConfigError,
    RunConfig,
    UserError,
    differing_settings,
    from_config_dict,
    local_path,
    to_json,
    unsettable,
)
from envace_jax.rewards import Reward
from envace_jax.sharding import make_mesh
from envace_jax.watch import Watch

TRACEBACK_FILE = "traceback.txt"
FAILED, BAD_INPUT, INTERRUPTED = 1, 2, 130  # exit codes; a shell gives 128 + 2, the number of SIGINT
DEFAULT_CACHE = "~/.cache/envace_jax/xla"
PACKAGE = Path(__file__).resolve().parent


def main(arguments: Sequence[str], reward: Reward | None = None) -> int:
    """Runs the command with `arguments` (the program's name first) and returns its exit code: 0, 2 for bad input, or
    130 for Ctrl-C. One of several processes that fails does not return: it ends with the others (`watch.py`).

    `reward` is a reward of one's own, for a script that is to have this command's flags.
    """
    workdir: Path | None = None
    together: Watch | None = None
    try:
        launch, arguments = hosts.read_flags(arguments)
        config, workdir = read_flags(arguments)
        use_compilation_cache(config.compilation_cache)
        hosts.start(launch)
        find_devices()
        together = watch.begin(functools.partial(stopped, workdir))
        with hosts.only_first_speaks(), stopping.listening(together.leave if together else os._exit) as signals:
            check_same(config, workdir)
            mesh = prepare_devices(config)
            print(f"work folder {workdir}", flush=True)

            from envace_jax import train  # after the checks, so that a typing mistake is answered at once

            try:
                train.run(config, mesh, workdir, reward, signals.asked)
            except stopping.Stopped:
                if hosts.first():
                    print(stopped(workdir), file=sys.stderr)
            hosts.exchange("all are through")  # until then all watch each other
    except (ValueError, OSError) as error:
        if not is_message(error):
            _end_all(together, error)
            raise
        report(error, workdir)
        _end_all(together, error, BAD_INPUT)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        print(stopped(workdir), file=sys.stderr)
        _end_all(together, error, INTERRUPTED)
        return INTERRUPTED
    except Exception as error:
        _end_all(together, error)
        raise
    if together is not None:
        together.stop()
        jax.distributed.shutdown()
    return 0


def _end_all(together: Watch | None, error: BaseException, code: int | None = None) -> None:
    """Ends all processes of the run because of this one's error; does nothing where it is alone.

    Without a code the error is the program's, or only the sign that another process is gone.
    """
    if together is None:
        return
    if code is None:
        if watch.may_be_anothers(error):
            together.wait()
        print(f"error: process {hosts.index()} failed:", file=sys.stderr)
        traceback.print_exception(error)
    name = "Ctrl-C" if isinstance(error, KeyboardInterrupt) else f"{type(error).__name__}: {error}"
    together.end_run(FAILED if code is None else code, " ".join(name.split())[:500])


def check_same(config: RunConfig, workdir: Path) -> None:
    """Raises UserError where the run's processes were started with other settings or another work folder."""
    told = hosts.exchange((to_json(config), str(workdir.absolute())))
    for process, (settings, folder) in enumerate(told):
        different = list(differing_settings(told[0][0], settings).values())
        if folder != told[0][1]:
            different.append(f"--workdir: {told[0][1]} -> {folder}")
        if different:
            raise UserError(f"process {process} was started otherwise than process 0: {different[0]}")


def read_flags(arguments: Sequence[str]) -> tuple[RunConfig, Path]:
    """The run's configuration and work folder from a command line. Raises ConfigError saying what is wrong with it."""
    arguments = [_with_home(argument) for argument in arguments]
    values = flags.FlagValues()
    config_flags.DEFINE_config_file(
        "config", help_string="The run's settings, a file in configs/.", flag_values=values, sys_argv=arguments
    )
    flags.DEFINE_string("workdir", "", "Folder of the run's files; by default runs/NAME of the config.", values)
    if any(argument in ("-h", "-help", "--help") for argument in arguments[1:]):
        print(f"{__doc__}\n{hosts.FLAGS_HELP}\n{values.get_help()}")
        raise SystemExit(0)
    check_overrides(arguments)
    try:
        rest = values(arguments)
    except flags.Error as error:
        if "parsing config file" not in str(error):
            raise ConfigError(str(error).splitlines()[0]) from error
        raise ConfigError(_config_file_problem(arguments, error)) from error
    except Exception as error:  # the config file is a program: it may raise anything
        raise ConfigError(_config_file_problem(arguments, error)) from error
    if len(rest) > 1:
        raise ConfigError(f"unexpected argument {rest[1]!r}; settings are given as --config.KEY=VALUE")
    if not values["config"].present:
        raise ConfigError("--config is missing; try --config=configs/tiny.py")
    path = config_flags.get_config_filename(values["config"])
    if not Path(path).is_file():
        near = ", ".join(sorted(entry.name for entry in Path(path).parent.glob("*.py"))) or "no such file"
        raise ConfigError(f"--config={path}: no such file; {Path(path).parent} holds {near}")
    values_given = values["config"].value
    if not isinstance(values_given, config_dict.ConfigDict):
        raise ConfigError(f"--config={path}: its get_config() must return a ConfigDict, such as default_config_dict()")
    workdir = values["workdir"].value or ""
    if "://" in workdir:
        raise ConfigError(f"--workdir={workdir}: an address, not a folder; docs/tpu.md says what will do")
    return from_config_dict(values_given), Path(workdir or Path("runs") / Path(path).stem)


def use_compilation_cache(setting: str) -> None:
    """Keeps compiled programs between runs in the folder `setting`; "" is the default one, "off" keeps none."""
    if setting == "off":
        return
    folder = local_path(setting or DEFAULT_CACHE)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"compilation_cache: {folder} cannot be made: {error.strerror}; off keeps none") from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def find_devices() -> list[jax.Device]:
    """All devices of all processes; nothing before this may ask for one. Raises UserError where there are none."""
    try:
        devices = jax.devices()
    except RuntimeError as error:  # a backend that was asked for is not there, or another process holds it
        raise UserError(f"no devices: {str(error).splitlines()[0]}") from error
    if hosts.count() > 1 and not hosts.started():  # a TPU tells of a slice by itself
        raise UserError(
            f"these devices belong to {hosts.count()} processes, and the others were not found; give --coordinator, "
            "--processes and --process (docs/hosts.md)"
        )
    return devices


def prepare_devices(config: RunConfig) -> Mesh:
    """The mesh over the first devices; says which there are. Raises ConfigError when they do not suffice."""
    devices = find_devices()
    kinds = ", ".join(sorted({device.device_kind for device in devices}))
    several = f" of {hosts.count()} processes" if hosts.count() > 1 else ""
    counted = f"{len(devices)} device{'s' * (len(devices) > 1)}{several}"
    print(f"backend {jax.default_backend()}: {counted} ({kinds})", flush=True)
    try:
        sizes = (config.mesh.data, config.mesh.fsdp, config.mesh.tensor)
        wanted = math.prod(sizes)
        # One process may leave devices unused; of several none may be without a part of the mesh.
        mesh = make_mesh(*sizes, devices=devices[:wanted] if not several and wanted < len(devices) else None)
    except (ValueError, NotImplementedError) as error:  # the second: a TPU's wiring has no such mesh
        raise ConfigError(f"config.mesh: {error}") from error
    shape = " ".join(f"{name}={size}" for name, size in mesh.shape.items())
    print(f"mesh {shape}: {mesh.size} of {len(devices)} devices", flush=True)
    return mesh


def is_message(error: BaseException) -> bool:
    """Whether an error speaks to the user: it comes from a `raise` in this package, or says which file is missing.

    Anything else (a shape error inside a library, say) is a fault of the program and keeps its traceback.
    """
    if isinstance(error, (UserError, FileNotFoundError)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and PACKAGE in Path(frames[-1].filename).parents and (frames[-1].line or "").startswith("raise")


def stopped(workdir: Path | None) -> str:
    """What to say after Ctrl-C, once a checkpoint that was being written is complete."""
    step = 0 if workdir is None else workfolder.steps_done(workdir)
    if not step:
        return "stopped before the first checkpoint; the same command starts anew"
    return f"stopped; the same command continues {workdir} from step {step}"


def report(error: BaseException, workdir: Path | None) -> None:
    """Prints the error's lines on stderr; the work folder gets the traceback of one that is not about the settings."""
    number = hosts.index_or_0()
    who = f"process {number}: " if number else ""
    for line in str(error).splitlines():
        print(f"error: {who}{line}", file=sys.stderr)
    if workdir is not None and workdir.is_dir() and not isinstance(error, UserError):
        path = own_file(workdir / TRACEBACK_FILE, number)
        path.write_text("".join(traceback.format_exception(error)))
        print(f"(where it was raised: {path})", file=sys.stderr)


def _with_home(argument: str) -> str:
    """`--config=~/FILE` and `--workdir=~/FOLDER` with the home folder in place: no shell expands a `~` after a `=`."""
    name, _, value = argument.partition("=")
    return f"{name}={local_path(value)}" if name.lstrip("-") in ("config", "workdir") and value[:1] == "~" else argument


def _config_file_problem(arguments: Sequence[str], error: BaseException) -> str:
    """One line about what went wrong while the config file ran: the file, the line in it, and the error."""
    given = re.findall(r"(?m)^--?config[=\n](.*)$", "\n".join(arguments))[-1]  # as --config=FILE or as --config FILE
    path = Path(given.partition(":")[0]).resolve()
    chain = [error]  # the flags library raises its own error while it handles the file's
    while chain[-1].__context__ is not None:
        chain.append(chain[-1].__context__)
    where, found = f"--config={given}", chain[-1]
    for link in chain:
        frames = traceback.extract_tb(link.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path]
        if lines:
            where, found = f"{where}, line {lines[-1]}", link
            break
    # ConfigDict's message for an unknown setting goes on to list all there are.
    text = re.sub(r'Other fields present: "\{.*\}"(\\n)?', "", str(found), flags=re.DOTALL)
    return f"{where}: the file cannot be used: {type(found).__name__}: {' '.join(text.split())}"


def check_overrides(arguments: Sequence[str]) -> None:
    """Raises ConfigError for `--config.KEY=...` that names no setting; the flags library says less about it."""
    problems = []
    for argument in arguments[1:]:
        name = argument.lstrip("-").split("=")[0].removeprefix("no")
        if argument.startswith("-") and name.startswith("config."):
            problems.append(unsettable(name.removeprefix("config.")))
    if any(problems):
        raise ConfigError("\n".join(problem for problem in problems if problem))


if __name__ == "__main__":
    sys.exit(main(sys.argv))
