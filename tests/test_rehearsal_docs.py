"""docs/rehearsal.md: its settings are those there are, with their defaults, and its example's names exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import re

from conftest import REPOSITORY

from envace_jax.rehearsal import Memory, Settings
from envace_jax.types import Task

TEXT = (REPOSITORY / "docs" / "rehearsal.md").read_text()


def test_the_table_has_every_setting_with_its_default():
    told = {}
    for names, defaults in re.findall(r"^\| (`[^|]+) \| ([^|]+) \|", TEXT, re.MULTILINE):
        told |= dict(zip(re.findall(r"`(\w+)`", names), (text.strip() for text in defaults.split(",")), strict=True))
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    assert set(told) == set(defaults)
    for name, text in told.items():
        assert text == (defaults[name] if isinstance(defaults[name], str) else f"{defaults[name]:g}"), name


def test_names_in_the_text_exist():
    fields = {field.name for kind in (Settings, Memory, Task) for field in dataclasses.fields(kind)}
    for kind, name in re.findall(r"`(Settings|Memory|Task)\.(\w+)`", TEXT):
        assert name in fields or hasattr({"Settings": Settings, "Memory": Memory, "Task": Task}[kind], name), name
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    for statement in ast.parse(code).body:
        if isinstance(statement, ast.ImportFrom):
            module = importlib.import_module(statement.module)
            assert all(hasattr(module, alias.name) for alias in statement.names)
