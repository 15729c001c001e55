"""`python -m envace_jax.evaluate`: what it writes, how it goes on, and one line for everything that cannot work."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import benchmark_helpers as bank
import pytest
from conftest import REPOSITORY
from test_finmcp import MANY, ONE, TOOLS

from envace_jax import benchmarks
from envace_jax.benchmarks import command, loading, table
from envace_jax.benchmarks.flags import read_flags
from envace_jax.config import ConfigError, RunConfig

SIZES = ["--context=400", "--response=12", "--config.sampler.slots=4", "--config.sampler.prefill_rows=(4,)"]
SIZES += ["--config.compilation_cache=off", "--config.prompts.style=compact", "--config.prompts.thinking=False"]


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.jsonl"
    samples = [{"id": "a", "messages": ONE, "tools": TOOLS}, {"id": "b", "messages": MANY, "tools": TOOLS}]
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    return path


def run(*flags):
    return command.run(["evaluate", *map(str, flags)])


def results(folder):
    return json.loads((folder / "results.json").read_text())


# --- scripts, without a model ---


def test_a_script_goes_the_whole_way_and_a_second_start_adds_nothing(data, tmp_path, capsys):
    flags = [
        "--benchmark=finmcp",
        f"--data={data}",
        "--policy=gold",
        f"--out={tmp_path / 'out'}",
        "--trials=2",
        "--seed=5",
    ]
    assert run(*flags) == 0
    found, shown = results(tmp_path / "out"), capsys.readouterr().out
    assert found["results"]["tool_f1"]["all"]["f1"] == 100.0 and "tool F1, all" in shown and "100.0" in shown
    assert found["seeds"] == [5, 6] and found["subset"] == {"name": "all", "ids": ["a/0", "a/1", "b/0", "b/1", "b/2"]}
    assert found["package"] == "FinMCP tool F1 of this package" and found["policy"] == {"policy": "gold"}
    assert found["command"].startswith("python -m envace_jax.evaluate --benchmark=finmcp") and "baselines" not in found
    assert found["missing"] == {"multi_tool": "no sample in the file"} and "multi_tool" in shown
    lines = (tmp_path / "out" / "trajectories.jsonl").read_text()
    assert [json.loads(line)["seed"] - json.loads(line)["trial"] for line in lines.splitlines()] == [5] * 10
    assert run(*flags) == 0
    assert (tmp_path / "out" / "trajectories.jsonl").read_text() == lines
    again = results(tmp_path / "out")
    assert {k: v for k, v in again.items() if "seconds" not in k} == {
        k: v for k, v in found.items() if "seconds" not in k
    }
    assert run(*flags[:-2], "--trials=3", "--seed=5") == 0  # more of the same
    assert len((tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()) == 15


def test_a_folder_of_another_run_is_refused(data, tmp_path, capsys):
    user = ["--config.user.urls=http://h:1/v1", "--config.user.model=big"]
    flags = ["--benchmark=finmcp", f"--data={data}", "--policy=gold", f"--out={tmp_path / 'out'}", *user]
    assert run(*flags) == 0
    before = results(tmp_path / "out")
    others = ["--seed=1"], ["--policy=noop"], ["--subset=first:1"], ["--config.user.model=small"]
    for other in (*others, ["--config.user.temperature=0.5"]):
        assert run(*flags, *other) == 2
        assert "holds a run that differs" in capsys.readouterr().err
    assert results(tmp_path / "out") == before
    assert run(*flags, "--config.user.urls=http://g:1/v1", "--config.user.timeout_s=5") == 0  # the same user
    data.write_text(data.read_text().replace("price?", "prices?"))
    assert run(*flags) == 2
    assert "holds a run that differs: tasks: " in capsys.readouterr().err


def test_with_a_config_file_earlier_messages_stand_as_such_a_policy_sampled_them(tmp_path):
    for config, as_sampled in ([[f"--config={REPOSITORY / 'configs' / 'tiny.py'}"], True], [SIZES, False]):
        chosen = read_flags(["evaluate", "--benchmark=tiny", "--model=asset:tiny_base", f"--out={tmp_path}", *config])
        with loading.local(chosen) as (policy, _):
            assert policy.prompts.as_sampled is policy.about["prompts"]["as_sampled"] is as_sampled


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "--benchmark is missing; there are: bfcl, finmcp"),
        (["--benchmark=chess"], "--benchmark=chess: there is no such benchmark; there are: bfcl"),
        (["--benchmark=finmcp"], "--model is missing"),
        (["--benchmark=finmcp", "--policy=best"], "--policy=best: no such script; there are: gold, noop, garbage"),
        (["--benchmark=finmcp", "--policy=gold", "--rehearsal=parallel:2"], "is a script"),
        (["--benchmark=finmcp", "--policy=gold", "--trials=0"], "trials"),
        (["--benchmark=finmcp", "--policy=gold", "--top_p=0"], "--top_p=0.0: must be above 0"),
        (["--benchmark=finmcp", "--policy=gold", "--response=-1"], "--response=-1"),
        (["--benchmark=finmcp", "--policy=gold", "--sead=1"], "there is no flag --sead"),
        (["--benchmark=finmcp", "--policy=gold", "--config.user.uls=x"], "user.uls: unknown setting"),
        (["--benchmark=finmcp", "--policy=gold"], "not part of this package.*--data=FILE"),
        (["--benchmark=vita", "--policy=gold"], "VitaBench has no package"),
        (["--benchmark=finmcp", "--model=/nowhere", "--data=DATA"], "/nowhere"),
        (["--benchmark=finmcp", "--model=m", "--data=DATA", "--server=host:1"], "--server=host:1: expected an address"),
        (["--benchmark=finmcp", "--model=asset:tiny_base", "--data=DATA", "--context=9999999"], "positions"),
        (["--benchmark=finmcp", "--model=asset:tiny_base", "--data=DATA", "--context=10", "--response=10"], "no room"),
        (["--benchmark=finmcp", "--policy=gold", "--data=DATA", "--categories=x"], "no 'x'; there are: single"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_line(flags, reason, data, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(*[flag.replace("DATA", str(data)) for flag in flags]) == 2
    said = capsys.readouterr().err.strip()
    assert "\n" not in said and said.startswith("error: ")
    assert re.search(reason, said), said


def test_help_says_what_it_is_and_every_flag(capsys):
    with pytest.raises(SystemExit):
        run("--help")
    shown = capsys.readouterr().out
    assert shown.startswith("`python -m envace_jax.evaluate`: measures a policy on a benchmark.")
    assert all(f"--{name}" in shown for name in ("benchmark", "rehearsal", "vita_path", "[no]spelled_tags"))


def test_the_library_is_where_it_was_and_the_module_is_the_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "envace_jax.evaluate", "--benchmark=nothing"], cwd=REPOSITORY, capture_output=True,
        text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2 and "there is no such benchmark" in done.stderr and "Traceback" not in done.stderr


# --- a model ---


def test_a_checkpoint_is_measured_beside_its_baselines(data, tmp_path, capsys):
    flags = ["--benchmark=finmcp", f"--data={data}", "--model=asset:tiny_base", f"--out={tmp_path / 'out'}", *SIZES]
    assert run(*flags) == 0
    found = results(tmp_path / "out")
    own, others = found["results"], found["baselines"]
    assert own["masked"] == 0 and own["sampled_tokens"] > 0 and own["tool_f1"]["all"]["wanted"] == 5
    assert others["gold"]["tool_f1"]["all"]["f1"] == 100.0 and others["noop"]["tool_f1"]["all"]["f1"] == 0.0
    assert found["policy"]["limits"]["act_context"] == 400 and found["policy"]["temperature"] == 0.6


@pytest.mark.slow
def test_a_killed_measurement_samples_the_same_when_it_goes_on(data, tmp_path):
    flags = ["--benchmark=finmcp", f"--data={data}", "--model=asset:tiny_base", f"--out={tmp_path / 'out'}", *SIZES]
    path = tmp_path / "out" / "trajectories.jsonl"
    assert run(*flags) == 0
    own, lines = results(tmp_path / "out")["results"], path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:2]))
    assert run(*flags) == 0
    assert sorted(path.read_text().splitlines(keepends=True)) == sorted(lines)
    assert results(tmp_path / "out")["results"] == own


@pytest.mark.slow
def test_the_tiny_world_is_a_benchmark_too(tmp_path):
    flags = ["--benchmark=tiny", "--subset=first:6", f"--out={tmp_path / 'out'}", "--config=configs/tiny.py"]
    assert run(*flags, "--model=asset:tiny_base", "--temperature=0", "--config.compilation_cache=off") == 0
    found = results(tmp_path / "out")
    assert found["baselines"]["gold"]["categories"]["heldout"]["score"] == 100.0
    assert found["baselines"]["noop"]["categories"]["heldout"]["score"] == 0.0
    assert found["policy"]["limits"]["act_context"] == 440 and found["results"]["masked"] == 0


def test_a_server_is_measured_by_the_same_command(data, tmp_path):
    def answer(body):
        calls = [{"id": "x", "type": "function", "function": {"name": "quote", "arguments": "{}"}}]
        return {"message": {"role": "assistant", "content": "", "tool_calls": calls}}

    server = bank.ChatServer(answer)
    with server.running() as url:
        flags = [
            "--benchmark=finmcp",
            f"--data={data}",
            "--model=served",
            f"--server={url}",
            f"--out={tmp_path / 'out'}",
        ]
        assert run(*flags, "--temperature=0", "--response=77") == 0
    found = results(tmp_path / "out")
    assert found["results"]["tool_f1"]["all"]["f1"] == pytest.approx(60.0) and found["policy"]["model"] == "served"
    assert {body["max_tokens"] for body in server.bodies} == {77} and {body["model"] for body in server.bodies} == {
        "served"
    }
    asked = [[message["role"] for message in body["messages"]] for body in server.bodies]
    assert ["user", "assistant", "tool"] in asked  # results stay results on the wire


@pytest.mark.slow
def test_with_rehearsal_a_checkpoint_plays_every_case_once(data, tmp_path):
    pytest.importorskip("envace_jax.rehearsal")
    flags = ["--benchmark=finmcp", f"--data={data}", "--model=asset:tiny_base", f"--out={tmp_path / 'out'}", *SIZES]
    assert run(*flags, "--rehearsal=parallel:2") == 0
    lines = [json.loads(line) for line in (tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()]
    assert len(lines) == 5 and all(line["rehearsed"]["completion_tokens"] > 0 for line in lines)
    assert results(tmp_path / "out")["policy"]["rehearsal"]["n"] == 2


# --- sizes ---


def test_sizes_fit_the_model():
    sized = loading.sized(RunConfig(), 40_960, 0, 0)
    assert (sized.limits.act_context, sized.limits.act_response) == (20_000, 8_000)
    assert sized.sampler.max_length == sized.sampler.cache_lengths[-1] == 20_000
    assert sized.prompts.max_act_prompt == 12_000 and sized.sampler.cache_dtype == "float32"  # this is a CPU
    assert sized.model.compute_dtype == sized.model.param_dtype == "float32"
    small = loading.sized(RunConfig(), 8_192, 0, 100)
    assert (small.limits.act_context, small.limits.act_response, small.prompts.max_act_prompt) == (8_192, 100, 8_092)
    least = loading.sized(RunConfig(), 8_192, 100, 0)
    assert least.sampler.prefill_lengths == least.sampler.cache_lengths == (100,) and least.limits.act_response == 40
    for context, response in ((9_000, 0), (100, 100)):
        with pytest.raises(ConfigError):
            loading.sized(RunConfig(), 8_192, context, response)


def test_every_benchmark_has_the_interface():
    assert set(benchmarks.names()) >= {"bfcl", "tau2", "vita", "finmcp"}
    suites = [name for name in benchmarks.names() if benchmarks.is_suite(benchmarks.load(name))]
    assert set(suites) >= {"bfcl", "tau2", "finmcp"} and "vita" not in suites
    masked = {"benchmark": "x", "results": {"categories": {}, "ended": {"fault": 2}, "masked": 2}}
    assert "2 attempts are masked" in "\n".join(table.lines(masked))
    assert "\n".join(table.lines({"benchmark": "vita", "figures": {"judged ota": None, "proxy ota": 12.345}})).endswith(
        "12.35"
    )
