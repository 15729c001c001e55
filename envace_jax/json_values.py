"""JSON as values: when two are equal, how a text is read strictly, and what can be written again.

Knows no records, tasks or files: callers say where a value came from.
"""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Mapping

from envace_jax.types import Json

# Far from Python's recursion limit, so that what was read here can be written, compared and pasted into a prompt
# anywhere later, whatever the caller's stack.
MAX_DEPTH = 100

Steps = tuple[str | int, ...]  # member names and list places, from the outermost value inwards


def json_equal(left: Json, right: Json) -> bool:
    """Equality of JSON values: 1 equals 1.0, true does not equal 1, the order of object members does not matter."""
    if isinstance(left, bool) or isinstance(right, bool):
        return left is right
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(json_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        return len(left) == len(right) and all(map(json_equal, left, right))
    return bool(left == right)


def parse(text: str) -> Json:
    """The value of a JSON text. Raises ValueError, in one line, for all else.

    NaN and Infinity are not JSON, and an object that has a name twice has no one meaning.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_object)
    except RecursionError:
        raise ValueError("not JSON that can be read (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None


def check_writable(value: Json, where: str = "") -> None:
    """Raises ValueError for what is no JSON value or cannot be written as one, naming the place within `where`.

    That is text with a lone surrogate (`"\\ud800"` parses, and neither a file nor a tokenizer takes it), a number
    beyond the floats (1e999 reads as infinity), nesting beyond MAX_DEPTH, and whatever a table may hold besides (bytes,
    times).
    """
    # A list of what is still to be seen, not recursion: the value may be nested deeper than Python recurses.
    unseen: list[tuple[Json, Steps]] = [(value, ())]
    while unseen:
        current, steps = unseen.pop()
        if isinstance(current, str):
            _check_text(current, where, steps)
        elif isinstance(current, float) and not math.isfinite(current):
            raise ValueError(f"{_place(where, steps)}: {current} is not a JSON number")
        elif isinstance(current, Mapping | list | tuple):
            if len(steps) >= MAX_DEPTH:
                raise ValueError(f"{_place(where, steps[:4])}: nested deeper than {MAX_DEPTH} levels")
            unseen += reversed([(child, (*steps, step)) for step, child in _members(current, where, steps)])
        elif current is not None and not isinstance(current, bool | int | float):
            raise ValueError(f"{_place(where, steps)}: a {type(current).__name__} is not a JSON value")


def check_depth(value: Json) -> None:
    """Raises ValueError for what is nested beyond MAX_DEPTH, whatever else it holds."""
    level: list[Json] = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            child
            for holder in level
            if isinstance(holder, Mapping | list | tuple)
            for child in (holder.values() if isinstance(holder, Mapping) else holder)
        ]
        if not level:
            return
    raise ValueError(f"nested deeper than {MAX_DEPTH} levels")


def _members(holder: Json, where: str, steps: Steps) -> list[tuple[str | int, Json]]:
    if not isinstance(holder, Mapping):
        return list(enumerate(holder))
    for name in holder:
        if not isinstance(name, str):
            raise ValueError(f"{_place(where, steps)}: the name of a member is a {type(name).__name__}, no text")
        _check_text(name, where, steps, " (the name of a member)")
    return list(holder.items())


def _check_text(text: str, where: str, steps: Steps, part: str = "") -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        place, lone = _place(where, steps) + part, ascii(text[error.start])
        raise ValueError(f"{place}: {lone} at character {error.start} is a lone surrogate, no character") from None


def _place(where: str, steps: Steps) -> str:
    """`extra_info.messages[0].content`; names that would make that unreadable stand in brackets, escaped."""
    place = where
    for step in steps:
        if isinstance(step, str) and step.isidentifier():
            place += f".{step}" if place else step
        else:
            place += f"[{json.dumps(step)}]"
    return place or "the value"


def _refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not a JSON value")


def _object(members: list[tuple[str, Json]]) -> dict[str, Json]:
    value = dict(members)
    if len(value) < len(members):
        twice = collections.Counter(name for name, _ in members).most_common(1)[0][0]
        raise ValueError(f"the name {ascii(twice)[:80]} stands twice in an object")
    return value
