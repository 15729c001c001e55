"""Who answers the policy's calls in training: the real environment, an external simulator, or the policy itself.

`python experiments/three_loops.py`: the tiny world, the same tasks, seeds, steps and settings for all three; all are
measured in the executable world. The simulator is a frozen copy of the base model in the same process: as able as the
policy that rehearses when training begins. About 4 minutes a run on two cores, three runs a seed.
"""

from __future__ import annotations

import studies
from studies import Variant

VARIANTS = (
    Variant("real", ("--config.rollout.responder=real",), "real environment"),
    Variant(
        "external",
        ("--config.rollout.responder=external", "--config.external.checkpoint=asset:tiny_base"),
        "external simulator",
    ),
    Variant("rehearsal", (), "world rehearsal"),
)


if __name__ == "__main__":
    studies.main("three_loops", __doc__, VARIANTS, beside="real")
