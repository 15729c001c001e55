"""What each choice of the method is worth: one setting at a time changed in the tiny run of world rehearsal.

`python experiments/ablations.py`: the same tasks, seeds and steps for all; all are measured in the executable world.
Fewer steps than the main run, since there are many runs: gains are smaller than in README's tables and compare with
each other. About 90 seconds a run on two cores.
"""

from __future__ import annotations

import studies
from studies import Variant

STEPS = 30
# Half the attempts of the main run's evaluation: what is compared are differences over seeds.
COMMON = (
    f"--config.steps={STEPS}",
    "--config.evaluation.samples=2",
    "--config.evaluation.greedy=False",
    "--config.evaluation.fidelity_calls=128",
)

# GSPO, CISPO and truncated importance weights are not here: a run makes one update a batch, all ratios are 1, and there
# their gradient is PPO's (tests/test_losses.py).
VARIANTS = (
    Variant("rehearsal", (), "world rehearsal, as in configs/tiny.py"),
    # Who learns
    Variant("frozen_rehearse", ("--config.rollout.players=frozen_rehearse",), "the rehearsing role stays the base"),
    Variant("frozen_act", ("--config.rollout.players=frozen_act",), "the acting role stays the base"),
    Variant("separate", ("--config.rollout.players=separate",), "each role has its own parameters"),
    # What is rewarded
    Variant(
        "fidelity_reward",
        ("--config.fidelity.calls_per_step=8", "--config.fidelity.attempts=4"),
        "and a reward for rehearsing a held-out result",
    ),
    # How advantages are formed
    Variant("leave_one_out", ("--config.grpo.baseline=leave_one_out",), "baseline of the other attempts"),
    Variant("std", ("--config.grpo.scale=std",), "advantages divided by the standard deviation"),
    # Which tasks are seen, and with what
    Variant("success_sampling", ("--config.data.sampling=success",), "tasks near one half drawn more often"),
    Variant("filter_groups", ("--config.data.filter_zero_variance=True",), "groups without signal replaced"),
    Variant("no_examples", ("--config.prompts.reference_examples=False",), "no reference calls in rehearse prompts"),
)


if __name__ == "__main__":
    studies.main("ablations", __doc__, VARIANTS, beside="rehearsal", defaults=COMMON)
