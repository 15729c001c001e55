"""The live panel on a pseudo-terminal: what the screen shows, what stays, and how a run's end leaves the terminal."""

from __future__ import annotations

import io
import math
import re
import signal
import textwrap

import pytest
from pty_terminal import PtyTerminal
from rich.console import Console

from envace_jax import terminal
from envace_jax.panel import View, panel_lines

VALUES = {
    "reward": 0.5, "solved": 0.25, "agreement": 0.9, "advantage_abs_act": 0.192, "advantage_abs_rehearse": 0.178,
    "tokens_act": 3548.0, "tokens_rehearse": 1326.0, "logprob_diff": 1e-7, "logprob_diff_max": 3e-6, "masked": 3.0,
    "tokens_per_second": 2345.0, "ended_done": 61.0, "ended_fault": 3.0,
}  # fmt: skip
REASON = "fault: TimeoutError: the judge \x1b[31m did not answer"
RUN = f"""
    import logging, os, subprocess, sys, time
    logging.basicConfig(stream=sys.stderr)
    from pathlib import Path
    from envace_jax.metrics import MetricsWriter
    values, reason = {VALUES!r}, {REASON!r}
    def run(writer):
        writer.start(total=8)
        writer.note("a note")
        writer.write(0, {{"eval_real_success": 0.4}})
        writer.masked({{reason: 2, "length": 1}})
        writer.write(1, values)
        writer.write(1, {{"eval_real_success": 0.5}})
        writer.progress(24, 64, 12345)
    def shown(seconds=60.0):  # waits for the test
        sys.stdin.readline()
"""
END = b"go\n"


def program(body: str, workdir: object) -> str:
    """A run that does `body` while the panel is up."""
    lines = textwrap.indent(textwrap.dedent(body), " " * 8)
    return (
        f"{RUN}\n    with MetricsWriter({str(workdir)!r}, tensorboard=False) as writer:\n        run(writer)\n{lines}\n"
    )


def panel_of(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("│", "╭", "╰"))]


def complete(lines: list[str]) -> bool:
    return lines[-1].startswith("╰") and any("24/64 trajectories" in line for line in lines)


def is_whole_screen(output: bytes) -> bool:
    """Whether the last word on what scrolls was: everything."""
    margins = re.findall(rb"\x1b\[(?:(\d+);(\d+))?r", output)
    return bool(margins) and margins[-1] == (b"", b"")


@pytest.mark.parametrize("columns", [80, 60])
def test_the_panel_shows_the_run_in_the_bottom_rows(tmp_path, columns: int) -> None:
    with PtyTerminal(program("shown()", tmp_path), columns, 26) as screen:
        lines = screen.until(complete)
        panel = panel_of(lines)
        assert lines[-len(panel) :] == panel and all(len(line) < columns for line in panel)
        text = " ".join(" ".join(line.strip("│ ").split()) for line in panel)
        for wanted in (
            "step 1/8", "12%", "left", "24/64 trajectories, 12,345 tokens sampled", "reward 0.500", "solved 0.25",
            "fidelity 0.90", "0.192 act 0.178 rehearse", "3,548 act 1,326 rehearse", "1.0e-07 apart, max 3.0e-06",
            "2,345 tokens/s", "masked 3 of 64, 3 in all", "2 x fault: TimeoutError: the judge", "1 x length",
            "eval at 1 real success 0.500 +0.100",
        ):  # fmt: skip
            assert wanted in text, f"{wanted!r} is not in {text!r}"
        above = [line for line in lines if line and line not in panel]
        assert above == ["a note", "step 0 evaluation: real_success 0.400", "step 1 evaluation: real_success 0.500"]
        screen.type(END)
        assert screen.wait() == 0
        left = [line for line in screen.lines if line]
        assert not panel_of(left) and left[3].startswith("go") and left[4].startswith("step 1/8  reward 0.500  solved")


def test_what_others_print_stands_above_and_nothing_is_lost(tmp_path) -> None:
    body = r"""
        for number in range(40):
            print(f"print {number}", flush=True)
            logging.warning("log %d", number)
            os.write(2, f"C++ {number}\n".encode())
            time.sleep(0.01)
        subprocess.run(["sh", "-c", "echo of a program"])
        sys.stdout.write("half a ")
        sys.stdout.flush()
        time.sleep(0.6)
        print("line")
        writer.within("all is written")
        shown()
    """
    with PtyTerminal(program(body, tmp_path), 80, 26) as screen:
        lines = screen.until(lambda lines: any("all is written" in line for line in lines))
        panel = panel_of(lines)
        assert lines[-len(panel) :] == panel and "half a line" in lines
        wanted = [text for n in range(40) for text in (f"print {n}", f"WARNING:root:log {n}", f"C++ {n}")]
        found = screen.everything
        assert [line for line in found if line in set(wanted)] == wanted and "of a program" in found
        assert len(panel_of(found)) == len(panel), "a copy of the panel was left behind"


def test_a_terminal_that_changes_its_size_has_one_panel_that_fits(tmp_path) -> None:
    body = "print('before', flush=True)\nshown()\nprint('after', flush=True)\nshown()"
    with PtyTerminal(program(body, tmp_path), 100, 30) as screen:
        screen.until(complete)
        for columns, rows in (
            (60, 24),
            (100, 40),
            (100, 32),
            (110, 36),
            (70, 20),
            (42, 14),
            (30, 5),
            (20, 2),
            (80, 26),
        ):
            screen.resize(columns, rows)
            bottom = "╰" if columns >= 60 else ""  # without room there is no border
            screen.until(lambda lines: lines[-1].startswith(bottom) and "".join(lines).count("step 1/8") == 1)  # noqa: B023
        screen.until(complete)
        lines = screen.lines
        assert len([line for line in lines if "step 1/8" in line]) == len([line for line in lines if "╭" in line]) == 1
        screen.type(END)
        lines = screen.until(lambda lines: "after" in lines)
        assert lines[-1].startswith("╰") and "".join(lines).count("step 1/8") == 1


def test_a_traceback_is_whole_and_below_it_is_nothing_of_the_panel(tmp_path) -> None:
    body = "shown()\nraise RuntimeError('it broke')"
    with PtyTerminal(program(body, tmp_path), 80, 26) as screen:
        screen.until(complete)
        screen.type(END)
        assert screen.wait() == 1
        found = screen.everything
        assert found[-1] == "RuntimeError: it broke" and not panel_of(found)
        at = found.index("Traceback (most recent call last):")
        assert all(line.startswith("  ") for line in found[at + 1 : -1]) and is_whole_screen(screen.output)


def test_ctrl_c_leaves_a_terminal_as_it_was(tmp_path) -> None:
    body = "time.sleep(60)"
    with PtyTerminal(program(body, tmp_path), 80, 26) as screen:
        screen.until(complete)
        screen.type(b"\x03")
        screen.wait()
        found = screen.everything
        assert found[-1] == "KeyboardInterrupt" and "^C" in "".join(found) and not panel_of(found)
        assert is_whole_screen(screen.output)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os.abort()", "os._exit(3)"])
def test_a_killed_process_leaves_a_terminal_that_scrolls(tmp_path, end: str) -> None:
    with PtyTerminal(program(f"shown()\n{end}", tmp_path), 80, 26) as screen:
        screen.until(complete)
        screen.type(END)
        assert screen.wait() in (-signal.SIGKILL, -signal.SIGABRT, 3)
        assert is_whole_screen(screen.output) and not panel_of(screen.everything)


def test_a_terminal_that_hangs_up_does_not_end_the_run(tmp_path) -> None:
    """SIGHUP is ignored, as under nohup; the panel's thread gives up."""
    done = tmp_path / "done"
    body = f"""
        import signal
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        time.sleep(1.5)
        writer._display._tell(now="not seen")
        time.sleep(0.5)
        Path({str(done)!r}).touch()
    """
    with PtyTerminal(program(body, tmp_path), 80, 26) as screen:
        screen.until(complete)
        screen.hang_up()
        screen.process.wait(120)
    assert done.exists()


def test_no_color_is_respected(tmp_path) -> None:
    colours = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|38|4[0-7]|9[0-7])[;m]")
    for environment, coloured in (({}, True), ({"NO_COLOR": "1"}, False)):
        with PtyTerminal(program("shown()", tmp_path), 80, 26, **environment) as screen:
            screen.until(complete)
            assert bool(colours.search(screen.output)) is coloured


def test_letters_that_the_terminal_cannot_write_are_not_used(tmp_path) -> None:
    with PtyTerminal(program("shown()", tmp_path), 80, 26, PYTHONIOENCODING="ascii") as screen:
        lines = screen.until(lambda lines: any("24/64" in line for line in lines))
        assert "".join(lines).isascii() and lines[-1].startswith("+--")


def test_a_dumb_terminal_gets_the_line(tmp_path) -> None:
    with PtyTerminal(program("shown()", tmp_path), 80, 26, TERM="dumb") as screen:
        lines = screen.until(lambda lines: any("24/64" in line for line in lines))
        assert [line for line in lines if line][-1] == "step 2/8  24/64 trajectories, 12,345 tokens sampled"
        assert b"\x1b" not in screen.output


def test_a_file_gets_plain_lines_and_rich_is_not_imported(run_python, tmp_path) -> None:
    code = program('assert "rich" not in sys.modules and "envace_jax.live" not in sys.modules', tmp_path)
    first, *_, last = run_python(code).splitlines()
    assert first == "a note" and last == "step 1 evaluation: real_success 0.500"


def test_a_stream_that_is_no_file_of_the_system_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not terminal.is_capable(io.StringIO())


# --- the panel's lines ---


def console(width: int = 200) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, color_system=None, width=width)


@pytest.mark.parametrize("columns", [1, 5, 20, 49, 50, 51, 70, 80, 120, 300])
@pytest.mark.parametrize("rows", [-3, 1, 4, 5, 12, 40])
def test_lines_fit_any_terminal(columns: int, rows: int) -> None:
    results = {"real_success": 0.5, "wide_名前" * 9: 0.5, "missing": None}
    rewards = (0.1, math.nan, math.inf, -math.inf, 0.3)
    reasons = {"[bold]markup[/] \x1b]0;title\x07\r\n\t\u202e": 4, "b" * 300: 1, "c": 1}
    view = View(
        "runs/名前", 9, 3, "now\x1b[2J", 61.0, 2.0, VALUES | {"reward": None}, rewards, reasons, 2, 3,
        results, {"real_success": 0.4},
    )  # fmt: skip
    lines = panel_lines(view, console(), columns, rows)
    assert 1 <= len(lines) <= max(rows, 1)
    plain = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines]
    assert all(letter.isprintable() for line in plain for letter in line)
    assert all(console().measure(line).maximum < max(columns, 2) for line in plain)


def test_before_the_first_step_nothing_is_made_up() -> None:
    text = "\n".join(panel_lines(View("run", 9, 0), console(), 80, 20))
    assert "time left: known after a step" in text and "none yet" in text and "nan" not in text


def test_an_evaluation_before_a_resumed_run_is_shown(tmp_path) -> None:
    code = f"""
        import sys
        from envace_jax.metrics import MetricsWriter
        with MetricsWriter({str(tmp_path)!r}, tensorboard=False) as writer:
            writer.write(0, {{"eval_real_success": 0.4}})
            writer.write(4, {{"reward": 0.5}})
            writer.write(4, {{"eval_real_success": 0.6}})
        with MetricsWriter({str(tmp_path)!r}, tensorboard=False, resume_step=4) as writer:
            writer.start(8, 4)
            sys.stdin.readline()
    """
    with PtyTerminal(code, 80, 26) as screen:
        lines = screen.until(lambda lines: any("eval at 4" in line for line in lines))
        assert "real success 0.600 +0.200" in "".join(lines) and "step 4/8" in "".join(lines)
