"""What private rehearsal gains in the tiny world: `python experiments/test_time_scaling.py [--trained FOLDER ...]`.

Modes none, parallel and sequential, N = 1, 2, 4 and 8 attempts, the base and the trained policies of three seeds:
success in the executable environment on held-out tasks, one real run each, sampled and greedy, against the tokens that
the rehearsals sampled. Memories that the policy writes and transcripts are compared for the same parallel attempts,
placements at the largest N. In the place of a rehearsal `reference` is a memory of the reference's own calls, more than
any rehearsal could find, and `wrong` is one whose first message errs.

`--turns` takes tasks of so many user turns alone: a memory is of the first one.
`--base` is the policy before training, by default the shipped one, which cannot read a memory; make_tiny_reader.py
makes one that can. `--trained` takes a work folder or model folder for each seed; where it is left out the policies are
trained first, from the base by the main command, about 4 minutes each on two quiet cores. Every cell is a file in
--runs: an interrupted table goes on where it was. Writes NAME`.json`, `.md` and `.png` into --out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import studies
from studies import ROOT, SEEDS, Variant

from envace_jax import evaluate, fingerprint, main, parts, rehearsal
from envace_jax.chat import load_tokenizer
from envace_jax.config import local_path, model_path
from envace_jax.envs import execution_count, imperfect, tiny
from envace_jax.episode import Limits
from envace_jax.memory import compact_lines
from envace_jax.metrics import write_json_atomic
from envace_jax.models import hf
from envace_jax.rehearsal import Memory, Settings
from envace_jax.rewards.checklist import ChecklistReward
from envace_jax.roles import Prompts, message_calls
from envace_jax.rollout import Player
from envace_jax.sharding import make_mesh
from envace_jax.types import Task

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  the backend has to be chosen first

NAME = "test_time_scaling"
SHIPPED = "asset:tiny_base"
ATTEMPTS = (1, 2, 4, 8)  # ascending
TASKS, TASK_SEED = 64, 0  # the first of the held-out tasks that training's own evaluation has
MEMORY_TOKENS = 192  # a rehearsed turn samples about 55
ROOM = (  # the memory comes on top of what the tiny world needs
    "--config.limits.act_context=640", "--config.sampler.max_length=640", "--config.sampler.cache_lengths=(640,)",
    "--config.warm_up=False",
)  # fmt: skip
REFERENCE, WRONG = "reference", "wrong"  # memories of those who know the answer
MEASURES = {"sampled": 1.0, "greedy": 0.0}  # temperature of the real run
RESAMPLES = 4000


def settings(mode: str, n: int = 1, **changes: Any) -> Settings:
    return Settings(mode, n, memory_tokens=MEMORY_TOKENS, **changes)  # type: ignore[arg-type]


def conditions(attempts: Sequence[int]) -> dict[str, Settings]:
    """What is measured, by name: modes and attempts, then the other placement, then memories that no rehearsal made.

    The parallel ones come by ascending attempts, since each goes on from those of the one before."""
    found = {"none": settings("none")}
    for n in attempts:
        found[f"parallel:{n}"] = settings("parallel", n)
        found[f"parallel:{n} transcript"] = settings("parallel", n, memory="transcript")
    found |= {f"sequential:{n}": settings("sequential", n) for n in attempts}
    for memory in ("written", "transcript"):
        found[f"parallel:{attempts[-1]} {memory} in user"] = settings(
            "parallel", attempts[-1], placement="user", memory=memory
        )
    known = [(name, place) for name in (REFERENCE, WRONG) for place in ("system", "user")]
    return found | {f"{name} in {place}": settings("none", placement=place) for name, place in known}


# --- one cell ---


@dataclasses.dataclass(frozen=True)
class Subject:
    """A policy that is measured."""

    player: Player
    prompts: Prompts
    limits: Limits
    # What is not computed twice: by mode the last rehearsal, which one with more attempts goes on from, and outcomes of
    # real runs by (task, memory, placement, temperature).
    rehearsed: dict[str, list[Memory]] = dataclasses.field(default_factory=dict)
    outcomes: dict[tuple[str, str, str, float], float] = dataclasses.field(default_factory=dict)

    def memories(self, chosen: Settings, tasks: Sequence[Task], seed: int) -> list[Memory]:
        found = rehearsal.rehearse(
            self.player, tasks, chosen, prompts=self.prompts, limits=self.limits, seed=seed,
            after=self.rehearsed.get(chosen.mode),
        )  # fmt: skip
        self.rehearsed[chosen.mode] = found
        return found

    def solved(self, tasks: Sequence[Task], temperature: float, seed: int) -> list[float]:
        """1 or 0 for each task, nan where something outside failed."""
        keys = [(task.task_id, task.note, task.note_place if task.note else "", temperature) for task in tasks]
        new = [task for key, task in zip(keys, tasks, strict=True) if key not in self.outcomes]
        if new:
            played = evaluate.success(
                self.player.sampler, self.player.params, new, reward=ChecklistReward(), prompts=self.prompts,
                limits=self.limits, samples=1, temperature=temperature, top_p=1.0, seed=seed,
            )  # fmt: skip
            missing = [key for key in keys if key not in self.outcomes]
            self.outcomes.update(zip(missing, played.per_task.tolist(), strict=True))
        return [self.outcomes[key] for key in keys]


def load(folder: Path) -> Subject:
    """The policy of a model folder, with the tiny world's settings and room for a memory."""
    arguments = [NAME, f"--config={ROOT / 'configs' / 'tiny.py'}", f"--config.model.path={folder}", *ROOM]
    config, _ = main.read_flags(arguments)
    mesh = make_mesh(1, 1, 1)
    model, params = hf.load(folder, mesh, dtype=config.model.param_dtype)
    policy, chat = parts.make_policy(config, model, mesh), load_tokenizer(folder)
    sampler = parts.make_sampler(config, policy, chat, mesh)
    return Subject(
        Player(sampler, policy.for_decoding(params)), parts.make_prompts(config, chat), parts.make_limits(config)
    )


def reference_memory(task: Task, wrong: bool = False) -> Memory:
    """The calls that the reference makes in the first user turn, in the compact form; the first message may err."""
    (first, *_) = tiny.turn_messages(tiny.conversation(task))
    steps = [message for message in first if message.get("tool_calls")]
    rng = random.Random(task.task_id)
    while wrong and steps:
        mistaken = imperfect.imperfect_step(steps[0], task, rng, 1.0)
        if mistaken.get("tool_calls"):  # another mistake is to call nothing
            steps[0], wrong = mistaken, False
    return Memory(compact_lines([call for message in steps for call in message_calls(message)]))


def measure(subject: Subject, name: str, chosen: Settings, tasks: Sequence[Task], seed: int) -> dict[str, Any]:
    """A cell: rehearsals, then one real run of each task at every temperature."""
    start, before = time.time(), execution_count()
    if name.startswith((REFERENCE, WRONG)):
        memories = [reference_memory(task, name.startswith(WRONG)) for task in tasks]
    else:
        memories = subject.memories(chosen, tasks, seed)
    found: dict[str, Any] = {
        "settings": dataclasses.asdict(chosen),
        "real_calls_before_the_commit": execution_count() - before,
        "no_memory": float(np.mean([not memory.text for memory in memories])),
    }
    for count in ("prompt_tokens", "completion_tokens", "cached_tokens"):
        found[count] = float(np.mean([getattr(memory, count) for memory in memories]))
    ready = [rehearsal.with_memory(task, memory.text, chosen) for task, memory in zip(tasks, memories, strict=True)]
    for measure_name, temperature in MEASURES.items():
        found[measure_name] = subject.solved(ready, temperature, seed)
    return found | {"seconds": time.time() - start}


def tasks_of(count: int, turns: int) -> list[Task]:
    """The first `count` held-out tasks; those of so many user turns, where `turns` is not 0."""
    drawn, found = count, list[Task]()
    while len(found) < count:
        found = [task for task in tiny.tasks("heldout", drawn, TASK_SEED) if turns in (0, len(task.user_turns))]
        drawn *= 2
    return found[:count]


def cells_of(
    policy: str, seed: int, folder: Path, names: Mapping[str, Settings], tasks: Sequence[Task], runs: Path
) -> dict[str, dict[str, Any]]:
    """The cells of a policy by condition; those that a file in `runs` has are only read."""
    told = {"model": fingerprint.of_model(folder), "tasks": fingerprint.of_tasks(tasks), "seed": seed}
    found: dict[str, dict[str, Any]] = {}
    subject: Subject | None = None
    for name, chosen in names.items():
        path = runs / f"{policy}-seed{seed}" / f"{name.replace(':', '-').replace(' ', '_')}.json"
        known = json.loads(path.read_text()) if path.is_file() else {}
        if {**told, "settings": dataclasses.asdict(chosen)}.items() <= known.items():
            found[name] = known
            continue
        subject = subject or load(folder)
        found[name] = told | measure(subject, name, chosen, tasks, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, found[name])
        rates = "  ".join(f"{measure_} {np.nanmean(found[name][measure_]):.3f}" for measure_ in MEASURES)
        print(f"{policy} seed {seed}  {name}: {rates}  {found[name]['seconds']:.0f} s", flush=True)
    return found


# --- the table ---


def row(cells: Sequence[Mapping[str, Any]], none: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of a condition over seeds: success, and the gain over `none` on the same tasks with the same seed."""
    found: dict[str, Any] = {
        count: float(np.mean([cell[count] for cell in cells])) for count in ("prompt_tokens", "completion_tokens")
    }
    for name in MEASURES:
        values = np.array([cell[name] for cell in cells], float)  # f64[seeds, tasks]
        gains = values - np.array([cell[name] for cell in none], float)
        found[name] = {"success": float(np.nanmean(values)), "by_seed": np.nanmean(values, axis=1).tolist()}
        found[name] |= {"gain": float(np.nanmean(gains)), "interval": interval_of(gains)}
    return found


def interval_of(gains: np.ndarray) -> list[float]:
    """The 95% interval of the mean of gains f64[seeds, tasks] by drawing tasks anew: a task's seeds stay together."""
    of_tasks = np.nanmean(gains, axis=0)
    drawn = np.random.default_rng(0).integers(0, len(of_tasks), (RESAMPLES, len(of_tasks)))
    return [float(end) for end in np.quantile(of_tasks[drawn].mean(axis=1), (0.025, 0.975))]


def markdown(rows: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """A line for each policy and condition."""
    head = ["policy", "rehearsal", "tokens a task"]
    head += [text for name in MEASURES for text in (f"solved, {name}", f"gain, {name} (95% interval)")]
    found = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for policy, by_name in rows.items():
        for name, figures in by_name.items():
            line = [policy, name, f"{figures['completion_tokens']:.0f}"]
            for measure_name in MEASURES:
                own = figures[measure_name]
                low, high = own["interval"]
                gain = "" if name == "none" else f"{own['gain']:+.3f} ({low:+.3f} to {high:+.3f})"
                line += [f"{own['success']:.3f}", gain]
            found.append("| " + " | ".join(line) + " |")
    return "\n".join(found)


def draw(rows: Mapping[str, Mapping[str, Mapping[str, Any]]], attempts: Sequence[int], path: Path) -> None:
    """Gain against the tokens that rehearsals sampled, a panel for each temperature of the real run."""
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(5.2 * len(MEASURES), 3.8), sharey=True, squeeze=False)
    colours, styles = {"parallel": "#2563eb", "sequential": "#d97706"}, {"base": "--", "trained": "-"}
    for axis, measure_name in zip(axes[0], MEASURES, strict=True):
        for policy, by_name in rows.items():
            for mode, colour in colours.items():
                points = [by_name[f"{mode}:{n}"] for n in attempts]
                tokens = np.array([point["completion_tokens"] for point in points])
                gain = np.array([point[measure_name]["gain"] for point in points])
                low, high = np.array([point[measure_name]["interval"] for point in points]).T
                axis.errorbar(
                    tokens, gain, yerr=[gain - low, high - gain], color=colour, linestyle=styles[policy], marker="o",
                    markersize=4, capsize=3, linewidth=1.4, elinewidth=0.8, label=f"{policy}, {mode}",
                )  # fmt: skip
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.set_xlabel("tokens sampled in rehearsal, a task")
        axis.set_title(f"real run {measure_name}", fontsize=10)
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("gain in tasks solved over no rehearsal")
    axes[0][-1].legend(fontsize=8, loc="best")
    axes[0][-1].margins(y=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


# --- the command ---


def model_folder(given: str) -> Path:
    """The model's folder of a work folder, or the folder itself."""
    path = local_path(given)
    inside = path / "model"
    return inside if (inside / "config.json").is_file() else hf.resolve(path)


def trained_folder(given: Sequence[str], number: int, seed: int, runs: Path, base: Path) -> Path:
    """The trained policy of a seed, trained now from `base` where none is given."""
    if given:
        return model_folder(given[number])
    variant = Variant(f"training seed {seed}", (f"--config.model.path={base}",), "configs/tiny.py")
    studies.run_one(variant, seed, runs / f"training-seed{seed}", (), None)
    return model_folder(str(runs / f"training-seed{seed}"))


def main_(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default=SHIPPED, help="the model folder before training")
    parser.add_argument("--name", default=NAME, help="of the files in --out, and of the default of --runs")
    parser.add_argument("--trained", nargs="+", default=[], help="a work or model folder for each seed")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--policies", nargs="+", default=["base", "trained"], choices=["base", "trained"])
    parser.add_argument("--attempts", type=int, nargs="+", default=list(ATTEMPTS))
    parser.add_argument("--tasks", type=int, default=TASKS)
    parser.add_argument("--turns", type=int, default=0, choices=range(4), help="of a user; 0: any number")
    parser.add_argument("--runs", type=Path, help="where the cells go; by default runs/NAME")
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(given)
    if args.trained and len(args.trained) != len(args.seeds):
        parser.error(f"--trained: {len(args.trained)} folders for {len(args.seeds)} seeds; give one for each")
    main.use_compilation_cache("")
    runs, wanted = (args.runs or Path("runs") / args.name).resolve(), conditions(args.attempts)
    base = hf.resolve(model_path(args.base)) if args.base == SHIPPED else model_folder(args.base).resolve()
    tasks = tasks_of(args.tasks, args.turns)
    found: dict[str, list[dict[str, dict[str, Any]]]] = {}
    for number, seed in enumerate(args.seeds):
        for policy in args.policies:
            folder = base
            if policy == "trained":
                folder = trained_folder(args.trained, number, seed, runs, base)
            found.setdefault(policy, []).append(cells_of(policy, seed, folder, wanted, tasks, runs))
    rows = {
        policy: {name: row([cells[name] for cells in own], [cells["none"] for cells in own]) for name in wanted}
        for policy, own in found.items()
    }
    table = markdown(rows)
    print(f"\n{args.tasks} held-out tasks, seeds {args.seeds}\n\n{table}")
    args.out.mkdir(parents=True, exist_ok=True)
    everything = [cell for own in found.values() for cells in own for cell in cells.values()]
    result = {
        "command": shlex.join(
            ["python", f"experiments/{NAME}.py", *(sys.argv[1:] if arguments is None else arguments)]
        ),
        "tasks": args.tasks,
        "turns": args.turns,
        "seeds": args.seeds,
        "real_calls_before_the_commit": sum(cell["real_calls_before_the_commit"] for cell in everything),
        "seconds": sum(cell["seconds"] for cell in everything),
        "settings": {name: dataclasses.asdict(chosen) for name, chosen in wanted.items()},
        "rows": rows,
    }
    write_json_atomic(args.out / f"{args.name}.json", result)
    (args.out / f"{args.name}.md").write_text(table + "\n")
    draw(rows, args.attempts, args.out / f"{args.name}.png")


if __name__ == "__main__":
    main_()
