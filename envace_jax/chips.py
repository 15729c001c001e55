"""TPU chips by name: what a planner must know of them, and the devices of a topology without the hardware.

The figures are the public ones of Google's documentation, but for the HBM that a program may use: that is what the
compiler (libtpu 0.0.52) names when a program does not fit. Knows no model and no program.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from envace_jax.config import UserError

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Chip:
    """One kind of TPU chip. Rates are peaks per second and chip."""

    name: str
    hbm_bytes: int  # that a program may use, by the compiler; the data sheet's capacity is a little more
    flops: float  # bfloat16
    hbm_bandwidth: float  # bytes
    ici_bandwidth: float  # bytes, all links together, one direction (the sheets' bidirectional figure is twice this)
    axes: int  # of the interconnect's torus
    source: str


CHIPS: Mapping[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip("v5e", int(15.75 * GIB), 197e12, 819e9, 200e9, 2, "https://cloud.google.com/tpu/docs/v5e"),
        Chip("v5p", int(95.73 * GIB), 459e12, 2765e9, 600e9, 3, "https://cloud.google.com/tpu/docs/v5p"),
        Chip("v6e", int(31.24 * GIB), 918e12, 1638e9, 400e9, 2, "https://cloud.google.com/tpu/docs/v6e"),
    )
}
EXAMPLES = "v5e:1x1, v5e:2x4, v5e:4x4, v5e:4x8, v5p:2x2x2, v5p:2x4x4, v6e:2x4"


def parse(topology: str) -> tuple[Chip, tuple[int, ...]]:
    """Chip and sizes of a name such as v5e:4x4. Raises UserError saying what is accepted."""
    name, _, sizes = topology.partition(":")
    if re.fullmatch(r"(gpu|cuda|nvidia|rtx|[abhlt]\d+).*", name.lower()):
        raise UserError(f"--topology={topology}: GPUs are not planned, since only TPU programs compile without a chip")
    chip = CHIPS.get(name)
    if chip is None:
        raise UserError(f"--topology={topology}: unknown chip {name!r}; known are {', '.join(CHIPS)}, as in {EXAMPLES}")
    if not re.fullmatch("x".join([r"[1-9]\d*"] * chip.axes), sizes):
        shape = "x".join("ABC"[: chip.axes])
        raise UserError(f"--topology={topology}: {name} has {chip.axes} axes: give {name}:{shape}, as in {EXAMPLES}")
    return chip, tuple(int(size) for size in sizes.split("x"))


def devices(topology: str) -> Sequence[Any]:
    """The devices of a topology, to compile for and not to run on. Raises UserError without libtpu or for a shape that
    does not exist."""
    parse(topology)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            f"--topology={topology}: libtpu, which compiles for TPUs on any machine, is missing; "
            "pip install 'envace-jax[plan]'"
        )
    # It looks for the machine's TPUs, and for a lock of its own, unless it is told not to.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except Exception as error:  # JaxRuntimeError and others, by what libtpu finds wrong
        raise UserError(f"--topology={topology}: {str(error).splitlines()[0]}; there are {EXAMPLES}") from error
