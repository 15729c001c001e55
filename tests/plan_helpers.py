"""A plan as the compiler would have it, in round numbers, for tests that compile nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

from train_helpers import tiny_config

from envace_jax import roofline
from envace_jax.chips import CHIPS, GIB
from envace_jax.planning import Bytes, Compiled, Plan, Traffic, phases_of

CHIP = dataclasses.replace(CHIPS["v5e"], hbm_bytes=10 * GIB)
PARTS = {
    "parameters": Bytes(1 * GIB), "optimizer": Bytes(2 * GIB), "batch": Bytes(GIB // 1024),
    "decoding parameters": Bytes(GIB // 2), "key-value cache": Bytes(3 * GIB),
}  # fmt: skip
PROGRAMS = {
    "reshard": Compiled("reshard", "reshard", 2 * GIB, GIB, GIB // 2),
    "prefill": Compiled("prefill of 4 x 64 tokens, cache of 512", "rollout", 4 * GIB, temporaries=GIB // 2),
    "decode": Compiled("decode, cache of 512", "rollout", 4 * GIB),
    "train": Compiled(
        "train step, 24 rows of 640 tokens", "train", 8 * GIB, 3 * GIB, temporaries=5 * GIB,
        traffic={"all-gather": Traffic(7, 2e9)},
    ),
}  # fmt: skip


def made_plan(parts: dict[str, Bytes] | None = None, config: Any = None, **changed: dict[str, Any]) -> Plan:
    """A plan on a chip of 10 GiB; `changed` maps a program's first word to other figures of it."""
    own = {name: dataclasses.replace(program, **changed.get(name, {})) for name, program in PROGRAMS.items()}
    where, run = PARTS | (parts or {}), config or tiny_config()
    programs = list(own.values())
    work = roofline.Work(8, 640, 320, 320, 640, 512)
    done = roofline.Flops(1e12, 0.0, 1e11, 1e11)
    seconds = {name: 1.0 for name in ("train", "reshard", "prefill", "decode")}
    time = {"seconds": seconds, "bound_by": dict.fromkeys(seconds, "memory"), "step": 4.0, "model_flops_share": 0.1}
    return Plan(
        config=run, topology="v5e:1x1", chip=CHIP, chips=1, parameters=10**9, rows=24, parts=where, programs=programs,
        phases=phases_of(programs, where), work=work, flops=done,
        time=None if any(program.error for program in programs) else time,
    )  # fmt: skip
