"""JSON as values: when two are equal."""

from __future__ import annotations

from collections.abc import Mapping

from envace_jax.types import Json


def json_equal(left: Json, right: Json) -> bool:
    """Equality of JSON values: 1 equals 1.0, true does not equal 1, the order of object members does not matter."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return bool(left == right)
