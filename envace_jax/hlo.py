"""What a compiled program says of itself: the collectives in its text, and the bytes that they send.

`compiled.as_text()` is the program of one device. A loop's body counts as often as the loop runs, a branch as if the
dearest one were taken. Knows text only; nothing of arrays or models.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
SCATTERED = "all-reduce-scatter"
WIDTHS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "bf16": 16, "f16": 16, "s32": 32}
WIDTHS |= {"u32": 32, "f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "token": 0}  # bits
SHAPE = re.compile(r"\b([a-z]+\d*(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")


@dataclasses.dataclass(frozen=True)
class Collective:
    kind: str  # one of COLLECTIVES
    shape: str  # its result as the program says it, without layout
    group: int  # devices that take part in one
    times: int  # it runs in one call of the program
    sent: int  # bytes that one device sends each time
    channel: int = 0  # the program's number for it; 0 where it has none


def collectives(text: str, devices: int) -> list[Collective]:
    """All collectives of a program (`compiled.as_text()`) for so many devices, each with how often it runs.

    Bytes are those of the usual ring: (n - 1) / n of the whole array for a gather or a scatter, twice that for a sum
    that all receive. Raises ValueError where the text has no entry computation.
    """
    computations, entry = _computations(text)
    if entry is None:
        raise ValueError("the text has no ENTRY computation; is it that of a compiled program?")

    def walk(name: str, times: int) -> list[Collective]:
        found: list[Collective] = []
        for line in computations.get(name, ()):
            parsed = INSTRUCTION.match(line)
            if parsed is None:
                continue
            result, kind, rest = parsed.group(2), parsed.group(3), parsed.group(4)
            plain = kind.removesuffix("-start")
            if plain in COLLECTIVES:
                if name.startswith("all-reduce-scatter"):  # a sum of which each keeps its part, as TPUs write it
                    plain = SCATTERED
                found.append(_collective(plain, result, rest, kind != plain, times, devices))
            elif kind == "while":
                body = re.search(r"body=%?([\w.\-]+)", rest)
                found += walk(body.group(1), times * _trips(rest, computations)) if body else []
            elif kind == "conditional":
                branches = [walk(branch, times) for branch in _branches(rest)]
                found += max(branches, key=total_bytes, default=[])
            elif kind != "reduce":
                for called in re.findall(r"(?:calls|to_apply)=%?([\w.\-]+)", rest):
                    found += walk(called, times)
        # One collective that runs beside other work is written in several places, under one number.
        once = {(one.channel, one.kind) if one.channel else position: one for position, one in enumerate(found)}
        return list(once.values())

    return walk(entry, 1)


def total_bytes(found: Iterable[Collective]) -> int:
    """Bytes that one device sends in one call of the program."""
    return sum(one.times * one.sent for one in found)


def shapes(text: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that the program's text names, those of fusions' insides included."""
    for dtype, sizes in SHAPE.findall(text):
        if dtype in WIDTHS:
            yield dtype, tuple(int(size) for size in sizes.split(",") if size)


def _computations(text: str) -> tuple[dict[str, list[str]], str | None]:
    """Lines of each computation by name, and the name of the one that the program begins with."""
    found: dict[str, list[str]] = {}
    entry, lines = None, None
    for line in text.splitlines():
        begin = re.match(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if begin:
            lines = found.setdefault(begin.group(2), [])
            entry = begin.group(2) if begin.group(1) else entry
        elif line.rstrip() == "}":  # a kernel's attributes may run over several lines
            lines = None
        elif lines is not None:
            lines.append(line)
    return found, entry


def _collective(kind: str, result: str, rest: str, started: bool, times: int, devices: int) -> Collective:
    arrays = SHAPE.findall(result)
    sizes = [_bytes(*array) for array in arrays]
    if started and kind == "collective-permute":  # what it reads comes first, and its own notes last
        arrays, sizes = arrays[1:2], sizes[1:2]
    elif started and kind != "all-reduce" and len(sizes) > 1:
        arrays, sizes = arrays[len(sizes) // 2 :], sizes[len(sizes) // 2 :]
    group, size = _group(rest, devices), sum(sizes)
    shares: dict[str, Callable[[int], float]] = {
        "all-gather": lambda n: (n - 1) / n,
        "all-reduce": lambda n: 2 * (n - 1) / n,
        "reduce-scatter": lambda n: n - 1,
        SCATTERED: lambda n: (n - 1) / n,
        "collective-permute": lambda n: 1,
    }
    share = shares.get(kind, lambda n: (n - 1) / n)(group)
    shape = " ".join(f"{dtype}[{numbers}]" for dtype, numbers in arrays)
    channel = re.search(r"channel_id=(\d+)", rest)
    return Collective(
        kind="reduce-scatter" if kind == SCATTERED else kind, shape=shape, group=group, times=times,
        sent=int(share * size), channel=int(channel.group(1)) if channel else 0,
    )  # fmt: skip


def _bytes(dtype: str, sizes: str) -> int:
    bits = 8 if dtype.startswith("f8") else WIDTHS.get(dtype, 32)
    return math.prod(int(size) for size in sizes.split(",") if size) * bits // 8


def _group(rest: str, devices: int) -> int:
    """Devices in one group of `replica_groups`: {{0,1},{2,3}}; [2,2]<=[4], two groups of two; or axes of a mesh."""
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return len(listed.group(1).split(","))
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", rest)
    if named:
        sizes = dict(re.findall(r"'([^']*)'=(\d+)", named.group(1)))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']*)'", named.group(2)))
    counted = re.search(r"replica_groups=\[\d+,(\d+)\]", rest)
    return int(counted.group(1)) if counted else devices


def _trips(rest: str, computations: dict[str, list[str]]) -> int:
    """How often a loop runs: as the compiler states it, else the one constant its condition has, else once."""
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', rest)
    if known:
        return int(known.group(1))
    condition = re.search(r"condition=%?([\w.\-]+)", rest)
    lines = computations.get(condition.group(1), ()) if condition else ()
    constants = {number for line in lines for number in re.findall(r"s32\[\]\S* constant\((\d+)\)", line)}
    return int(constants.pop()) if len(constants) == 1 else 1


def _branches(rest: str) -> list[str]:
    listed = re.search(r"branch_computations=\{([^}]*)\}", rest)
    if listed:
        return re.findall(r"[\w.\-]+", listed.group(1))
    return re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", rest)
