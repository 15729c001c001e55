"""Executes the code cells of a notebook in one fresh interpreter, without Jupyter, and says what each showed.

The cells are taken as they are; only parameters are set after the cell tagged `parameters`, as papermill does. .ci/run
executes the same notebook in a Jupyter kernel.
"""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any


def read(path: Path | str) -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def source(cell: dict[str, Any]) -> str:
    return "".join(cell["source"])


def code_cells(book: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def is_parameters(cell: dict[str, Any]) -> bool:
    return "parameters" in cell["metadata"].get("tags", ())


def assigned(text: str) -> list[str]:
    """The names that a cell assigns at its top level, in order."""
    return [
        target.id
        for statement in ast.parse(text).body
        if isinstance(statement, ast.Assign)
        for target in statement.targets
        if isinstance(target, ast.Name)
    ]


def execute(
    path: Path | str, parameters: dict[str, Any], only: tuple[str, ...] = (), preset: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Runs the code cells, or those whose ids are in `only`, in order and returns their common names.

    `preset` are names that cells which are left out would have given. A picture that a cell's last expression gives is
    fetched, as Jupyter does, and its size printed. Raises ValueError for a parameter that the notebook does not have,
    and whatever a cell raises.
    """
    module = types.ModuleType("__main__")
    names = module.__dict__
    names.update(preset or {})
    for cell in code_cells(read(path)):
        if only and cell["id"] not in only:
            continue
        text = source(cell)
        print(f"[cell {cell['id']}]", flush=True)
        tree = ast.parse(text)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, f"cell {cell['id']}", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"cell {cell['id']}", "eval"), names)
            if hasattr(value, "_repr_png_"):
                print(f"[picture of {len(value._repr_png_())} bytes]")
        if is_parameters(cell):
            if unknown := set(parameters) - set(assigned(text)):
                raise ValueError(f"{path}: no parameters {sorted(unknown)}; there are {assigned(text)}")
            names.update(parameters)
    return names


if __name__ == "__main__":
    execute(sys.argv[1], json.loads(sys.argv[2]), tuple(sys.argv[3:]))
