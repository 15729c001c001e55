"""Makes one HTML page of runs: their curves over each other, trajectories, settings and what differs, environments.

    python -m envace_jax.report WORKDIR [WORKDIR ...] [--out=FILE]
    python -m envace_jax.report WORKDIR [WORKDIR ...] --serve [--port=8001]

The page is one file that opens from a disk and asks nobody for anything; by default it is written into the first work
folder, as report.html. With --serve nothing is written: the page is served to this machine and follows the runs while
they go on, until Ctrl-C. A run that was killed, or is of another version, is shown as far as it can be read. Bad input
is answered by one line on stderr and exit code 2 (docs/report.md).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from envace_jax.config import UserError, local_path
from envace_jax.metrics import write_text_atomic
from envace_jax.reporting import live, page

REPORT_FILE = "report.html"
BAD_INPUT = 2  # exit code


def main(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` (the program's name first) and returns its exit code."""
    try:
        own = _flags().parse_args(list(arguments[1:]))
        workdirs = [local_path(path) for path in own.workdirs]
        if own.serve:
            if own.out:
                raise UserError(f"--out={own.out}: nothing is written with --serve")
            return live.serve(workdirs, own.port)
        out = local_path(own.out) if own.out else workdirs[0] / REPORT_FILE
        write(workdirs, out)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def write(workdirs: Sequence[Path], out: Path) -> None:
    """Writes the page of the runs in these folders and says how large it is. Raises UserError."""
    text = page.html(page.build(workdirs))
    try:
        write_text_atomic(out, text)
    except OSError as error:
        raise UserError(f"--out={out}: cannot be written: {error.strerror}") from error
    name = str(out).encode(errors="backslashreplace").decode()  # a folder's name may be no text
    print(f"{name}: {len(text.encode()) / 1e6:.1f} MB")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def _flags() -> argparse.ArgumentParser:
    parser = _Parser("envace_jax.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workdirs", metavar="WORKDIR", nargs="+", help="a run's work folder")
    parser.add_argument("--out", default="", help=f"the page; by default {REPORT_FILE} in the first work folder")
    parser.add_argument("--serve", action="store_true", help="serve the page to this machine and follow the runs")
    parser.add_argument("--port", type=int, default=8001, help="of --serve; 0 takes a free one")
    return parser


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
