"""docs/tpu.md: its commands are ones that the programs take, its names and messages exist, its scripts parse or run."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from conftest import REPOSITORY, run_python

from envace_jax import config as configuration
from envace_jax import main

TEXT = (REPOSITORY / "docs" / "tpu.md").read_text()
BLOCKS = re.findall(r"(?m)^```(\w+)\n(.*?)^```$", TEXT, re.DOTALL)
SHELL = [text for language, text in BLOCKS if language in ("bash", "slurm")]
PROGRAM = re.compile(r"-m envace_jax\.(\w+)((?:[ \t]+(?![<>|&]|2>)[^\s']+)*)")
# Named on the page and not there yet: checked as soon as they are. To be emptied then.
HOSTS = re.compile(r"--(coordinator|processes|process)=(.*)")


def joined(text):
    """The text with continued lines in one, and without comments."""
    return re.sub(r"(?m)(^|\s)#(?!SBATCH|!).*$", "", text.replace("\\\n", " "))


def commands():
    """(program, arguments) of every `python -m envace_jax...` on the page, wherever it stands."""
    return [
        (name, shlex.split(rest.replace("$WORKDIR", "/w").replace("$HOME", "/h").replace("$attention", "plain")))
        for text in SHELL
        for name, rest in PROGRAM.findall(joined(text))
    ]


def gcloud():
    """Every gcloud command as a list of words, quoted text being one."""
    lines = [line for text in SHELL if "gcloud" in text for line in re.split(r"(?m)^(?=gcloud)", joined(text))]
    return [shlex.split(line) for line in lines if line.startswith("gcloud")]


def there(module):
    found = importlib.util.find_spec(f"envace_jax.{module}") is not None
    assert found
    return found


def known(setting):
    return configuration.unknown_setting(setting) is None


@pytest.mark.parametrize("program, arguments", commands(), ids=lambda value: value if isinstance(value, str) else "")
def test_the_commands_are_taken(program, arguments, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    processes = dict(HOSTS.fullmatch(argument).groups() for argument in arguments if HOSTS.fullmatch(argument))
    if program == "plan":
        assert any(re.fullmatch(r"--topology=v\d\w+:\d+(x\d+)+", argument) for argument in arguments)
        if there("plan"):
            from envace_jax import plan

            plan.read_flags(["plan", *arguments])
            return
        arguments = [argument for argument in arguments if not argument.startswith("--topology")]
        arguments.append("--config.data.source=tasks.jsonl")
    else:
        assert program == "main"
    if processes:
        assert set(processes) == {"coordinator", "processes", "process"}
        assert re.fullmatch(r"[\w.]+:\d+", processes["coordinator"])
        assert 0 <= int(processes["process"]) < int(processes["processes"])
        if there("hosts"):
            from envace_jax import hosts

            launch, arguments = hosts.read_flags(["main", *arguments])
            assert launch is not None and launch.process == int(processes["process"])
            arguments = arguments[1:]
        arguments = [argument for argument in arguments if not HOSTS.fullmatch(argument)]
    if not known("model.attention"):
        arguments = [argument for argument in arguments if "model.attention=" not in argument]
    config, workdir = main.read_flags(["main", *arguments])  # which also says what cannot work together
    assert program == "plan" or any("--workdir=" in argument for argument in arguments), "say where files go"
    if program == "main":
        assert workdir.name and config.mesh.data * config.mesh.fsdp * config.mesh.tensor in (1, 2, 8, 16)


def test_there_is_a_command_for_every_way():
    found = {program for program, _ in commands()}
    given = [" ".join(arguments) for _, arguments in commands()]
    assert found == {"main", "plan"} and len(given) >= 9
    for part in ("qwen3_0p6b_colab", "qwen3_8b.py --config.data", "--coordinator=", "/shared/xla", "tiny.py"):
        assert any(part in line for line in given), part
    # no command is hidden from this test by how it is written
    assert len(given) == sum(text.count("-m envace_jax.") for text in SHELL)


def test_the_settings_files_and_folders_that_it_names_exist():
    settings = set(re.findall(r"--config\.([a-z_0-9.]+)=", TEXT))
    groups = "|".join(configuration.to_json(configuration.RunConfig()))
    settings |= set(re.findall(rf"`((?:{groups})\.(?!py|md|json)[a-z_0-9]+)`", TEXT))
    assert len(settings) >= 12
    for name in settings:
        assert known(name), name
    ours = re.sub(r"https?://\S+", "", TEXT)
    paths = set(re.findall(r"\b(?:configs|experiments|docs)/[\w./]+\w", ours))
    assert {"configs/tiny.py", "experiments/colab_tpu.ipynb"} <= paths
    paths |= {f"docs/{name}" for name in re.findall(r"\]\((\w+\.md)\)", TEXT)}
    for path in paths:
        assert (REPOSITORY / path).is_file(), path


def test_gcloud_lines_are_whole_and_name_where():
    lines = gcloud()
    assert len(lines) >= 11
    for line in lines:
        if line[1] == "storage":
            assert line[2:4] == ["cp", "--recursive"]
            continue
        assert line[1:3] == ["compute", "tpus"] and line[3] in ("tpu-vm", "queued-resources"), line
        assert "--zone=$ZONE" in line and "--project=$PROJECT" in line, line
        flags = [word.partition("=")[0] for word in line if word.startswith("--")]
        assert len(set(flags)) == len(flags)
        known = {
            "create": {"--accelerator-type", "--version", "--runtime-version", "--node-id", "--spot",
                       "--valid-until-duration"},
            "ssh": {"--worker", "--command"},
            "scp": {"--worker", "--recurse"},
            "delete": {"--quiet", "--force"},
            "describe": {"--format"},
        }[line[4]]  # fmt: skip
        assert set(flags) <= known | {"--zone", "--project"}, line
        if line[4] == "ssh":
            assert "--worker" in flags
            inside = next(word.partition("=")[2] for word in line if word.startswith("--command="))
            parses(inside)


def test_a_run_in_the_background_lets_the_connection_go(tmp_path):
    """What is to outlive ssh holds none of its streams; else gcloud would wait for the end of the run."""
    stand_in = tmp_path / "venv" / "bin" / "python"
    stand_in.parent.mkdir(parents=True)
    (tmp_path / "envace_jax").mkdir()
    stand_in.write_text('#!/bin/bash\necho "$@" > ~/asked\necho $$ > ~/pid\nexec sleep 120\n')
    stand_in.chmod(0o755)
    inside = [word.partition("=")[2] for line in gcloud() for word in line if word.startswith("--command=")]
    inside = [command for command in inside if "nohup" in command]
    assert len(inside) == 2
    for command in inside:
        environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        try:
            subprocess.run(["bash", "-c", command], env=environment, capture_output=True, check=True, timeout=60)
            until = time.monotonic() + 60
            while not (tmp_path / "pid").exists() and time.monotonic() < until:
                time.sleep(0.05)
            assert "-m envace_jax.main" in (tmp_path / "asked").read_text()
            assert (tmp_path / "run.log").exists()
        finally:
            os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)
            (tmp_path / "pid").unlink()


def parses(script):
    done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stderr}"


@pytest.mark.parametrize("script", SHELL, ids=range(len(SHELL)))
def test_the_shell_takes_every_block(script):
    parses(script)


def test_the_batch_file_is_one():
    (script,) = [text for language, text in BLOCKS if language == "slurm"]
    assert script.startswith("#!/bin/bash\n")
    head, _, body = script.partition("set -euo pipefail")
    assert body and all(line.startswith("#") or not line for line in head.splitlines())  # later ones are not read
    options = dict(re.findall(r"(?m)^#SBATCH --([\w-]+)=(\S+)$", head))
    nodes, gpus = int(options["nodes"]), int(options["gpus-per-node"])
    assert options["ntasks-per-node"] == "1" and f"--config.mesh.fsdp={nodes * gpus} " in body
    assert f"JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(gpus)))} " in body


@pytest.mark.parametrize(
    ("code", "summary", "again"),
    [
        (0, False, True),
        (0, True, False),
        (75, False, True),
        (134, False, True),
        (137, True, True),
        (2, False, False),
        (1, False, False),
    ],
)
def test_the_batch_file_goes_back_into_the_queue_only_where_that_helps(code, summary, again, tmp_path):
    """The file is run with stand-ins for SLURM's programs."""
    (script,) = [text for language, text in BLOCKS if language == "slurm"]
    (tmp_path / "bin").mkdir()
    stand_ins = {"srun": f'echo "$@" > {tmp_path}/asked; exit {code}', "scontrol": f'echo "$@" > {tmp_path}/queued'}
    for name, text in stand_ins.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    for folder in ("runs/qwen3_8b", "venv/bin", "envace_jax"):
        (tmp_path / "shared" / folder).mkdir(parents=True)
    (tmp_path / "shared/venv/bin/activate").touch()
    if summary:
        (tmp_path / "shared/runs/qwen3_8b/summary.json").touch()
    environment = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "17"}
    script = script.replace("/shared", f"{tmp_path}/shared")
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert "-m envace_jax.main" in (tmp_path / "asked").read_text()
    assert (tmp_path / "queued").exists() == again
    assert not again or (tmp_path / "queued").read_text().split() == ["requeue", "17"]


def test_slurm_gives_jax_what_the_page_says():
    """One process of two, all GPUs of its node, and a port of the job's number."""
    values = {"SLURM_JOB_ID": "4099", "SLURM_STEP_NODELIST": "node[007-008]", "SLURM_NTASKS": "2", "SLURM_PROCID": "1",
              "SLURM_LOCALID": "0"}  # fmt: skip
    found = run_python(
        """
        from jax._src.clusters import ClusterEnv
        print(ClusterEnv.auto_detect_unset_distributed_params(None, None, None, [0, 1], None, 1)[:3])
        print(ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, 1)[3])
        """,
        env=values,
    )
    assert found.splitlines() == [f"('node007:{65535 - 2**12 + 1 + 4099 % 2**12}', 2, 1)", "[0]"]


def test_the_messages_that_it_explains_are_ours():
    """Each is found in the file that it names, word by word; `...` stands for what changes."""
    rows = re.findall(r"(?m)^\| `([^`]+)` \((\w+\.py)\)", TEXT)
    assert len(rows) >= 7
    checked = 0
    for message, file in rows:
        found = list((REPOSITORY / "envace_jax").rglob(file))
        assert found, file
        source = re.sub(r'"\s*\n\s*f?"', "", "".join(path.read_text() for path in found))
        for piece in message.split("..."):
            assert piece.strip() in source, (piece, file)
        checked += 1
    assert checked >= 5


def test_the_measurement_of_the_interconnect_runs():
    (script,) = [text for language, text in BLOCKS if language == "python"]
    assert "1 << 26" in script
    printed = run_python(script.replace("1 << 26", "1 << 10"), devices=8)
    assert re.fullmatch(r"8 devices: \d+\.\d\d ms, \d+\.\d GB/s a device\n", printed)


def test_the_sizes_of_checkpoints_are_those_of_the_models():
    """12 bytes a parameter, of the parameters that Qwen3's published models have."""
    published = {"0.6B": 596049920, "1.7B": 1720574976, "4B": 4022468096, "8B": 8190735360, "14B": 14768307200,
                 "32B": 32762123264}  # fmt: skip
    names, sizes = (re.findall(r"[\w.]+(?= \|)", line) for line in re.findall(r"(?m)^\| (?:\||a check).*", TEXT))
    assert names[-6:] == list(published)
    assert [int(size) for size in sizes[-6:]] == [round(count * 12 / 1e9) for count in published.values()]
    assert 470 * 8.5 / 60 * 16 == pytest.approx(1065, abs=1)


def test_the_page_says_what_is_missing():
    titles = re.findall(r"(?m)^## (.*)$", TEXT)
    for title in ("One TPU VM", "A pod", "Queued resources", "Colab", "GPU", "SLURM", "Any machines, by flags",
                  "What it costs", "What is not verified here"):  # fmt: skip
        assert title in titles
    assert titles[-1] == "What was planned"
    assert "$" not in "".join(re.findall(r"\d+ USD|\$\d", TEXT))  # no price that will be wrong


def test_a_bucket_is_refused_as_the_page_says(monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    with pytest.raises(configuration.ConfigError, match="gs://bucket/run: an address"):
        main.read_flags(["main", "--config=configs/tiny.py", "--workdir=gs://bucket/run"])
    assert main.read_flags(["main", "--config=configs/tiny.py", "--workdir=~/x"])[1] == Path.home() / "x"
