"""Saves and restores everything a run needs to continue exactly: the device state, and one JSON document beside it.

A thin layer over Orbax. A checkpoint counts only once all of it is written (a rename, and a commit file in it), so a
killed run leaves none half-written. It does not know what the JSON means (the run loop does), nor when to save.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit the run; the text names the folder and the cause."""


class Unreadable(CheckpointError):
    """A checkpoint that is damaged."""


class Checkpoints:
    """The checkpoints of one run, in `folder`; the newest `keep` are kept. With keep None they are only read.

    Every process of the run must make this object and call every method at the same points (Orbax synchronises them).
    """

    def __init__(self, folder: Path | str, keep: int | None = 2) -> None:
        self.folder = Path(folder).absolute()
        writes = keep is not None
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=writes, cleanup_tmp_directories=writes)
        # Named here, or a restarted run could not look at a checkpoint without restoring it (and Orbax would warn).
        handlers = {"state": ocp.StandardCheckpointHandler(), "extra": ocp.JsonCheckpointHandler()}
        self._manager = ocp.CheckpointManager(self.folder, options=options, item_handlers=handlers)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes, so that a save in progress becomes complete whatever ends the run.

        Not where one of several processes failed: the others may never come to what it takes.
        """
        if kind is not None and jax.process_count() > 1:
            return
        try:
            self.close()
        except Exception:
            if kind is None:  # else the error under way says more
                raise

    def steps(self) -> list[int]:
        """The steps with a complete checkpoint, oldest first."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
        """Writes `state` (a pytree of arrays) and `extra` (JSON values) in the background.

        Returns when the arrays are copied to host memory, so the caller may donate them at once. A failure of the save
        before is raised here. Raises ValueError when `extra` does not survive JSON unchanged (a tuple, a NaN, an int as
        a key), CheckpointError when the step is already there.
        """
        kept = json.loads(json.dumps(extra, allow_nan=False))  # written later, when the caller may have changed its own
        if kept != extra:
            raise ValueError(
                "checkpoint: `extra` must be plain JSON (lists, string keys) so that it reads back unchanged"
            )
        if step in self.steps():
            raise CheckpointError(f"{self.folder}: step {step} is there already")
        items = ocp.args.Composite(state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(kept))
        if not self._manager.save(step, args=items, force=True):
            raise CheckpointError(f"{self.folder}: step {step} was not saved")

    def latest_extra(self) -> dict[str, Any] | None:
        """The `extra` of the newest checkpoint in which it can be read; None without one. No array is read."""
        for step in reversed(self.steps()):
            try:
                return self._manager.restore(step, args=ocp.args.Composite(extra=ocp.args.JsonRestore()))["extra"]
            except Exception:  # `restore_latest` says so
                continue
        return None

    def restore_latest(self, template: Any) -> tuple[Any, dict[str, Any]] | None:
        """Returns (state, extra) of the newest readable checkpoint, or None when there is none.

        `template` is a pytree of arrays, or of `jax.ShapeDtypeStruct` with shardings; the restored state has its
        structure, shapes, dtypes and shardings, and the values bit by bit as saved. A damaged checkpoint is reported on
        stderr, moved to the folder NAME.damaged, and the one before it is used; but only with one process, because
        several could disagree about which. Raises CheckpointError when checkpoints exist and none can be read, or when
        one does not fit the template.
        """
        self._manager.wait_until_finished()
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                restored = self.restore(step, template)
                if damaged:
                    self._set_aside(damaged)
                    print(f"checkpoint: continuing from step {step} instead", file=sys.stderr)
                return restored
            except Unreadable as error:
                if jax.process_count() > 1:
                    raise (error.__cause__ or error) from None  # what befell another process shows in it
                damaged[step] = str(error)
                print(f"checkpoint: {damaged[step]}", file=sys.stderr)
        if damaged:
            raise CheckpointError("; ".join(damaged.values()) + "; remove the folder to start afresh")
        return None

    def restore(self, step: int, template: Any) -> tuple[Any, dict[str, Any]]:
        """(state, extra) of one checkpoint, as `restore_latest` gives them. Raises Unreadable where it is damaged, or
        CheckpointError where it does not fit."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, template)
        self._check_fit(step, abstract)
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), extra=ocp.args.JsonRestore())
        try:
            restored = self._manager.restore(step, args=items)
        except Exception as error:  # Orbax, tensorstore and the JSON reader each raise their own kinds
            raise Unreadable(f"{self.folder / str(step)}: cannot be read: {_first_line(error)}") from error
        return restored["state"], restored["extra"]

    def wait(self) -> None:
        """Blocks until the save in progress is complete on disk; raises what went wrong in it."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, then frees the background threads."""
        self._manager.wait_until_finished()
        self._manager.close()

    def _set_aside(self, steps: Iterable[int]) -> None:
        """Moves checkpoints out of the way: the continued run saves these steps again."""
        aside = self.folder.with_name(f"{self.folder.name}.damaged")
        aside.mkdir(exist_ok=True)
        for step in steps:
            shutil.rmtree(aside / str(step), ignore_errors=True)
            (self.folder / str(step)).rename(aside / str(step))
        self._manager.reload()

    def _check_fit(self, step: int, abstract: Any) -> None:
        """Raises CheckpointError when the saved tree differs from the template in structure, shape or dtype."""
        try:
            saved = self._manager.item_metadata(step)["state"]
        except Exception:  # unreadable metadata: the restore that follows says so
            return
        if saved is None:
            return
        tree = getattr(saved, "tree", saved)
        have = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in _leaves(tree)}
        want = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in _leaves(abstract)}
        where = self.folder / str(step)
        if len(have) != len(want):
            raise CheckpointError(f"{where}: holds {len(have)} arrays, this run has {len(want)}")
        for (name, leaf), (_, old) in zip(sorted(want.items()), sorted(have.items()), strict=True):
            if tuple(old.shape) != tuple(leaf.shape) or old.dtype != leaf.dtype:
                described = f"{leaf.dtype}{list(leaf.shape)}, saved as {old.dtype}{list(old.shape)}"
                raise CheckpointError(
                    f"{where}: {name} is {described}: the checkpoint is of another model or optimizer"
                )


def _leaves(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"[:300]
