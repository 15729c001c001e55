"""The report's command, what it reads from work folders in whatever state, the page's file, and the live server."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
import report_helpers
from report_helpers import write_lines, write_run

from envace_jax import report
from envace_jax.config import UserError
from envace_jax.reporting import live, page, panels, read

EVIL = "</script><img src=x onerror=\"document.title='owned'\"> \u202e\u0000\u001b[31m \ud800"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", steps=6)


# --- reading ---


def test_a_steps_numbers_and_its_evaluations_join(folder):
    write_lines(
        folder / "metrics.jsonl",
        [
            {"step": 0, "eval_real_success": 0.25},
            {"step": 1, "reward": 0.5, "masked": 0, "solved": None, "flag": True, "words": "text"},
            {"step": 2, "reward": 0.75, "new_metric": 3},
            {"step": 2, "eval_real_success": 0.5},
        ],
    )
    run = read.read_run(folder)
    assert run.name == "run" and run.steps == (0, 1, 2) and run.notes == ()
    assert run.metrics == {
        "eval_real_success": (0.25, None, 0.5), "reward": (None, 0.5, 0.75), "masked": (None, 0.0, None),
        "new_metric": (None, None, 3.0),
    }  # fmt: skip
    assert run.config["data"]["count"] == 40 and run.summary["seed"] == 0 and run.starts[0]["backend"] == "cpu"


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_read_to_there(folder):
    path = folder / "metrics.jsonl"
    whole = read.read_run(folder)
    path.write_bytes(path.read_bytes()[:-30])  # of the last evaluation, which shares its step with a training line
    cut = read.read_run(folder)
    assert cut.steps == whole.steps and cut.notes == ()
    assert cut.metrics["eval_fidelity"][-1] is None and cut.metrics["reward"] == whole.metrics["reward"]


def test_what_cannot_be_read_is_left_out_and_said(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    bad = [b"\xff\xfe\x00", b"[1, 2]", b'{"reward": 1}', b'{"step": "7"}', b"{" * 5000, b'{"step": 3, "reward": 1e999}',
           b'{"step": 4, "reward": 1' + b"0" * 400 + b"}", b"", lines[1].encode(), b""]  # fmt: skip
    (folder / "metrics.jsonl").write_bytes(b"\n".join(bad))
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    (folder / "environment.json").write_text('{"jax": "0.1"}')
    (folder / "summary.json").write_text("[")
    run = read.read_run(folder)
    assert run.steps == (1, 3, 4) and run.metrics["reward"][1:] == (None, None)  # infinity is no measurement
    assert run.config is None and run.starts == () and run.summary is None
    assert [note.partition(":")[0] for note in run.notes] == [
        "config.json", "metrics.jsonl", "environment.json", "summary.json"
    ]  # fmt: skip
    assert "line 1 and 4 more could not be read" in run.notes[1]
    assert page.unpack(page.pack(page.build([folder]).data))["runs"][0]["notes"] == list(run.notes)


@pytest.mark.parametrize("left", ["metrics.jsonl", "config.json"])
def test_one_file_of_a_run_is_enough(folder, left):
    for path in folder.iterdir():
        if path.name != left:
            path.unlink()
    run = read.read_run(folder)
    assert (len(run.steps) > 0) == (left == "metrics.jsonl") and (run.config is None) == (left == "metrics.jsonl")
    assert report.main(["report", str(folder)]) == 0


def make_empty(path: Path) -> None:
    path.mkdir()


def make_file(path: Path) -> None:
    path.write_text("text")


def make_model(path: Path) -> None:
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "qwen3"}')


def make_other_metrics(path: Path) -> None:
    path.mkdir()
    (path / "metrics.jsonl").write_text('{"epoch": 1}\n{"epoch": 2}\n')


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda path: None, "no such folder"),
        (make_file, "not a folder"),
        (make_empty, "not a run's work folder: it has neither metrics.jsonl nor a run's config.json"),
        (make_model, "not a run's work folder"),
        (make_other_metrics, "no line of it is a step's record"),
    ],
    ids=["missing", "a file", "empty", "a model", "another program's"],
)
def test_what_is_no_work_folder_is_refused_in_one_line(tmp_path, capsys, make: Callable[[Path], None], reason):
    make(tmp_path / "other")
    good = write_run(tmp_path / "run", steps=2)
    assert report.main(["report", str(good), str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'other'}") and reason in error and error.count("\n") == 1
    assert not (good / "report.html").exists()


def make_loop(path: Path) -> None:
    path.symlink_to(path.name)


def make_pipes(path: Path) -> None:
    path.mkdir()
    for name in ("metrics.jsonl", "config.json"):
        os.mkfifo(path / name)


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (make_loop, "loop", "cannot be read: Too many levels of symbolic links"),
        (lambda path: None, "x" * 300, "cannot be read: File name too long"),
        (make_pipes, "pipes", "not a run's work folder"),
    ],
    ids=["a loop of links", "a name too long", "pipes"],
)
def test_a_path_that_no_folder_is_behind_is_refused_in_one_line(tmp_path, capsys, make, name, reason):
    make(tmp_path / name)
    assert report.main(["report", str(tmp_path / name)]) == 2
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1


def test_pipes_and_values_nested_without_end_are_left_out(folder, capsys):
    """A pipe would never end, and what copies or writes such values would."""
    nested = '{"a":' * 500 + "1" + "}" * 500
    (folder / "summary.json").write_text(nested)
    (folder / "environment.json").write_text(f"[{nested}]")
    settings = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(f'{settings[:-1]}, "more": {nested}}}')
    run = read.read_run(folder)
    assert run.config is None and run.summary is None and run.starts == () and len(run.notes) == 3
    assert report.main(["report", str(folder)]) == 0
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    (folder / "config.json").write_text(settings)
    assert read.read_run(folder).steps == () and report.main(["report", str(folder)]) == 0


def test_a_folder_whose_name_is_no_text_is_shown(tmp_path):
    folder = write_run(tmp_path / os.fsdecode(b"run\xff"), steps=2)
    command = [sys.executable, "-m", "envace_jax.report", str(folder)]
    environment = os.environ | {"PYTHONUTF8": "1"}
    done = subprocess.run(command, cwd=Path(report.__file__).parents[1], env=environment, capture_output=True)
    assert done.returncode == 0 and done.stdout.startswith(str(tmp_path).encode()) and done.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "the following arguments are required: WORKDIR"),
        (["{run}", "--port=x"], "invalid int value: 'x'"),
        (["{run}", "--other"], "unrecognized arguments: --other"),
        (["{run}", "{run}/."], "named twice"),
        (["{run}", "--out={run}"], "cannot be written: Is a directory"),
        (["{run}", "--out={run}/no/such.html"], "cannot be written: No such file or directory"),
        (["{run}", "--serve", "--port=70000"], "--port=70000: "),
        (["{run}", "--serve", "--out=x.html"], "--out=x.html: nothing is written with --serve"),
    ],
)
def test_bad_arguments_are_one_line(folder, capsys, arguments, reason):
    assert report.main(["report", *(argument.format(run=folder) for argument in arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and reason in error and error.count("\n") == 1


def test_runs_of_one_name_are_told_apart_by_their_folders():
    assert read.names([Path("/a/x"), Path("/b/y")]) == ["x", "y"]
    assert read.names([Path("/a/one/run"), Path("/a/two/run")]) == ["one/run", "two/run"]
    assert read.names([Path("/run"), Path("/a/run")]) == ["/run", "a/run"]


# --- the page ---


class _Parts(HTMLParser):
    """Attributes that make a browser fetch something, and what stands in data elements."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str | None] = []
        self.tags: list[str] = []
        self.data: dict[str, str] = {}
        self.within: str | None = None

    def handle_starttag(self, tag, attributes):
        known = dict(attributes)
        self.tags.append(tag)
        self.within = known["id"] if known.get("type") == "application/octet-stream+gzip" else None
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]

    def handle_endtag(self, tag):
        self.within = None

    def handle_data(self, data):
        if self.within:
            self.data[self.within] = data


def test_the_page_is_one_file_that_asks_for_nothing_and_holds_the_data(folder, capsys):
    assert report.main(["report", str(folder)]) == 0
    assert capsys.readouterr().out.startswith(f"{folder / 'report.html'}: 0.")
    text = (folder / "report.html").read_text()
    parts = _Parts()
    parts.feed(text)
    assert {link for link in parts.fetched if not link.startswith("#")} == {"data:,"}
    assert "default-src 'none'" in text and "connect-src 'none'" in text and "@" not in re.findall(r"<!--.", text)
    data = page.unpack(parts.data["report-data"])
    (shown,) = data["runs"]
    assert shown["steps"] == list(range(7)) and not data["live"]
    assert shown["metrics"]["reward"] == pytest.approx([None, *read.read_run(folder).metrics["reward"][1:]])
    assert page.unpack(parts.data["viewer-data"])["runs"] == page.build([folder]).viewer["runs"]
    assert "connect-src 'self'" in page.html(page.build([folder], live=True), live=True)


def test_our_scripts_never_read_text_as_markup():
    ours = [path for path in page.FOLDER.glob("*.js")] + [page.FOLDER / "page.html"]
    assert len(ours) > 3
    for path in ours:
        text = path.read_text()
        assert not re.search(r"innerHTML|insertAdjacentHTML|outerHTML|document\.write|eval\(|https?://", text), path
    for path in page.FOLDER.rglob("*.js"):
        assert "</script" not in path.read_text().lower()


def test_text_of_a_run_is_data_and_never_markup(folder):
    settings = json.loads((folder / "config.json").read_text())
    settings["data"]["source"] = EVIL
    (folder / "config.json").write_text(json.dumps(settings))
    write_lines(folder / "metrics.jsonl", [{"step": 1, EVIL: 1.0}])
    text = page.html(page.build([folder]))
    parts = _Parts()
    parts.feed(text)
    clean = _Parts()
    clean.feed(page.html(page.build([write_run(folder.parent / "clean", steps=2)])))
    assert parts.tags == clean.tags
    (shown,) = page.unpack(parts.data["report-data"])["runs"]
    assert shown["config"]["data"]["source"] == EVIL and shown["metrics"] == {EVIL: [1]}


def incompressible(workdir: Path, most: int) -> dict[str, str]:
    return {"text": random.Random(0).randbytes(most * 5 // 8).hex(), "most": str(most)}


@pytest.mark.parametrize("runs", [1, 3])
def test_five_hundred_steps_stay_below_five_megabytes_and_trajectories_get_the_rest(tmp_path, monkeypatch, runs):
    monkeypatch.setattr(page, "viewer_data", incompressible)
    folders = [write_run(tmp_path / str(number), steps=500, seed=number) for number in range(runs)]
    built = page.build(folders)
    size = len(page.html(built).encode())
    assert page.MOST_BYTES == 5_000_000 and 4_500_000 < size < page.MOST_BYTES
    assert sum(int(run["data"]["most"]) for run in built.viewer["runs"]) > 3_000_000
    assert built.data["runs"][0]["notes"] == ()  # nothing was thinned


def test_a_long_run_is_thinned_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(page, "MOST_STEPS", (100, 10))
    folder = write_run(tmp_path / "long", steps=1000, every=300)
    (shown,) = page.build([folder]).data["runs"]
    assert shown["notes"] == ["of 1001 steps every 11th is drawn"]
    assert {0, 11, 300, 600, 900, 1000} <= set(shown["steps"]) and len(shown["steps"]) < 110
    assert all(len(values) == len(shown["steps"]) for values in shown["metrics"].values())
    monkeypatch.setattr(page, "MOST_BYTES", 2_000_000 + len(page.html(page.Report({}, {}))) - 500_000 + 20_000)
    (shown,) = page.build([folder]).data["runs"]
    assert len(shown["steps"]) < 20


def test_every_chart_names_metrics_that_runs_record():
    """Those of a plain training step, that is; the charts' patterns are for what only some runs have."""
    draw = random.Random(0)
    recorded = report_helpers.training_line(1, 10, draw) | report_helpers.evaluation_line(1, 10, draw)
    named = {name for panel in panels.PANELS for name, _ in panel.metrics}
    assert named - recorded.keys() == {"fidelity_reward"}
    assert len({panel.id for panel in panels.PANELS}) == len(panels.PANELS)


def test_the_command_asks_for_no_device(folder):
    command = [sys.executable, "-m", "envace_jax.report", str(folder)]
    subprocess.run(command, check=True, env=os.environ | {"JAX_PLATFORMS": "no such platform"})


# --- live ---


@pytest.fixture
def served(folder, monkeypatch) -> Iterator[Callable[..., tuple[int, str]]]:
    """Asks a live server for a path: status and text."""
    monkeypatch.setattr(live, "REST", 0.0)
    with live.Server([folder], 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()

        def ask(path: str = "", **headers: str) -> tuple[int, str]:
            request = urllib.request.Request(server.address + path, headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=30) as answer:
                    return answer.status, answer.read().decode()
            except urllib.error.HTTPError as error:
                return error.code, error.read().decode()

        yield ask
        server.shutdown()


def test_a_live_page_hears_what_is_new(served, folder):
    status, text = served()
    parts = _Parts()
    parts.feed(text)
    shown = page.unpack(parts.data["report-data"])
    assert status == 200 and shown["live"] and shown["runs"][0]["steps"][-1] == 6
    assert served(f"data?have={shown['at']}") == (204, "")
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "reward": 0.125}\n{"step": 8, "rew')
    status, text = served(f"data?have={shown['at']}")
    news = json.loads(text)
    assert status == 200 and news["version"] != shown["at"] and news["viewer"] == {"runs": []} | news["viewer"]
    assert news["data"]["runs"][0]["steps"][-1] == 7 and news["data"]["runs"][0]["metrics"]["reward"][-1] == 0.125
    assert served(f"data?have={news['version']}")[0] == 204
    assert not (folder / "report.html").exists()


def test_a_live_server_answers_to_its_own_name_only(served):
    assert served("data", Host="evil.example:80")[0] == 403
    assert served("data", Host="localhost:80")[0] == 200
    assert served("etc/passwd")[0] == 404


def test_a_folder_that_goes_away_is_said_to(served, folder):
    served()
    shutil.rmtree(folder)
    assert served("data") == (503, f"{folder}: no such folder; a run's --workdir is wanted")


def test_a_report_is_not_made_so_often_that_the_run_would_wait(folder, monkeypatch):
    made = []
    build = page.build

    def slow(*arguments, **named):
        made.append(time.monotonic())
        time.sleep(0.05)
        return build(*arguments, **named)

    monkeypatch.setattr(page, "build", slow)
    current = live.Current([folder])
    for step in range(7, 27):
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(f'{{"step": {step}, "reward": 0.5}}\n')
        current.report()
    assert len(made) < 4 and (len(made) < 2 or made[1] - made[0] > 10 * 0.05)
    monkeypatch.setattr(current, "_free_at", 0.0)
    assert current.report()[1].data["runs"][0]["steps"][-1] == 26


def test_ctrl_c_ends_the_server_in_order(folder, monkeypatch, capsys):
    def interrupted(self) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(live.Server, "serve_forever", interrupted)
    assert report.main(["report", str(folder), "--serve", "--port=0"]) == 0
    assert re.fullmatch(r"report at http://127.0.0.1:\d+/ \(Ctrl-C ends it\)\nstopped\n", capsys.readouterr().out)
    with live.Server([folder], 0) as server, pytest.raises(UserError, match="in use; give another --port"):
        live.serve([folder], server.server_address[1])


def test_a_reader_that_goes_away_is_no_error(folder, capsys):
    """Whether it asks nothing, asks and does not wait, or resets the connection."""
    with live.Server([folder], 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        for request in (b"", b"GET / HTTP/1.1\r\nHost: localhost:1\r\n\r\n", b"GET /data HTTP/1.1\r\n"):
            reader = socket.create_connection(server.server_address[:2])
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a close resets
            reader.sendall(request)
            reader.close()
        urllib.request.urlopen(server.address).read()
        time.sleep(0.3)
        server.shutdown()
        thread.join()
    assert capsys.readouterr().err == ""
