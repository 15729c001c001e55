"""Which charts a report has, and which metrics are on each. A metric that no run recorded is left out; those that are
on no chart can be chosen in the last one."""

from __future__ import annotations

import dataclasses
from typing import Literal

Scale = Literal["share", "zero", "log"]  # from 0 to 1; from 0; logarithmic, for what is above 0


@dataclasses.dataclass(frozen=True)
class Panel:
    """One chart over a run's steps."""

    id: str
    title: str
    text: str  # what is seen, for its caption
    unit: str
    metrics: tuple[tuple[str, str], ...] = ()  # (name, label)
    pattern: str = ""  # a regular expression: further metrics, labelled by its first group; counts, 0 where absent
    scale: Scale = "zero"


ROLES = ("act", "rehearse")


def by_role(metric: str) -> tuple[tuple[str, str], ...]:
    """A metric that is recorded for each role."""
    return tuple((f"{metric}_{role}", role) for role in ROLES)


PANELS = (
    Panel(
        "reward", "Reward in training", "Mean reward of a step's trajectories, and the share that was solved; masked "
        "ones are left out.", "share", (("reward", "mean reward"), ("solved", "solved")), scale="share",
    ),
    Panel(
        "success", "Real success, held-out tasks", "Share of held-out tasks solved in the executable environment.",
        "share", (("eval_real_success", "sampled"), ("eval_real_success_greedy", "greedy")), scale="share",
    ),
    Panel(
        "unseen", "Real success, unseen domain", "The same in the domain that training never sees.", "share",
        (("eval_unseen_domain", "sampled"), ("eval_unseen_domain_greedy", "greedy")), scale="share",
    ),
    Panel(
        "fidelity", "Fidelity of rehearsal", "Share of rehearsed results that equal the executed or recorded ones.",
        "share",
        (
            ("eval_fidelity", "held-out, with examples"),
            ("eval_fidelity_without_examples", "held-out, no examples"),
            ("agreement", "in training"),
            ("fidelity_reward", "held-out results in training"),
        ),
        scale="share",
    ),
    Panel(
        "advantage", "Size of advantages, by role", "Mean of |advantage| over each role's trained tokens.",
        "|advantage|", by_role("advantage_abs"),
    ),
    Panel(
        "spread", "Spread of rewards in groups, by role", "Highest minus lowest reward of a task's attempts, mean over "
        "groups. At 0 a group teaches nothing.", "reward", by_role("reward_spread"),
    ),
    Panel(
        "flat", "Groups without signal, by role", "Groups whose attempts were all rewarded alike.", "groups",
        by_role("zero_variance_groups"),
    ),
    Panel("tokens", "Trained tokens, by role", "Tokens under the loss mask in a step.", "tokens", by_role("tokens")),
    Panel(
        "logprobs", "Sampler against trainer", "Difference of the two's logprobs over trained tokens; logarithmic.",
        "|difference|", (("logprob_diff", "mean"), ("logprob_diff_max", "max")), scale="log",
    ),
    Panel(
        "masked", "Masked trajectories", "Trajectories that an outside fault took out of training, or out of an "
        "evaluation.", "trajectories", (("masked", "in training"), ("eval_masked", "in evaluations")),
    ),
    Panel(
        "ended", "How trajectories ended", "Trajectories of a step by the reason for which they ended.",
        "trajectories", pattern="^ended_(.*)$",
    ),
    Panel(
        "faults", "Faults of judge, external model and user", "Failed tries by kind, counted since the run was last "
        "started.", "tries", pattern="^((?:judge|external|user)_(?:fault_.*|given_up))$",
    ),
    Panel(
        "speed", "Sampling speed", "Sampled tokens over the seconds of the whole step.", "tokens/s",
        (("tokens_per_second", "tokens/s"),),
    ),
    Panel(
        "slots", "Slot use", "Share of decoding slots that drew a token, over a step's decoding.", "share",
        (("slot_use", "slots in use"),), scale="share",
    ),
    Panel(
        "seconds", "Seconds of a step", "A whole step, and the part after sampling.", "s",
        (("seconds", "step"), ("train_seconds", "after sampling")),
    ),
    Panel(
        "compiled", "Programs compiled", "Built or loaded since the step before; 0 once all shapes were met.",
        "programs", (("compiled", "programs"),),
    ),
)  # fmt: skip
