"""VitaBench through a checkout of one's own: its program plays, and this package's policy is the model that it asks.

VitaBench has no package, and its user and its judge are language models, so a run needs the checkout, an interpreter
that it is installed in (ENVACE_VITA_PYTHON), the policy behind an address (`python -m envace_jax.serve`), and another
model for user and judge. Beside the judge's reward stands a proxy that needs no judge: whether the orders in the end
are those that the task requires. It is not VitaBench's score, which looks at rubrics.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envace_jax.benchmarks import Options
from envace_jax.benchmarks.scores import Attempt, category_figures
from envace_jax.config import UserError
from envace_jax.metrics import write_json_atomic
from envace_jax.types import Json

PYTHON_VARIABLE = "ENVACE_VITA_PYTHON"
CATEGORIES = ("delivery", "instore", "ota", "delivery,instore,ota")  # VitaBench's domains, and all together
PACKAGE = "src/vita"  # where a checkout has its code
NEEDED = (
    "VitaBench has no package: clone github.com/meituan-longcat/vitabench (MIT), install it into an interpreter of its "
    f"own ({PYTHON_VARIABLE}), and give the checkout by --vita_path=FOLDER (docs/benchmarks.md)"
)
# What tells orders apart; ids of orders, times of their making, prices and states do not.
FIELDS = (
    "order_type", "store_id", "shop_id", "hotel_id", "attraction_id", "flight_id", "train_id", "address", "date",
)  # fmt: skip
PRODUCT_FIELDS = ("product_id", "room_id", "ticket_id", "seat_id", "quantity", "date")
ORDERS = ("new_orders", "orders")  # what a simulation's final state may call them


def about(options: Options) -> dict[str, Any]:
    """What a continued run must have in common with the one before. Says plainly what is missing."""
    checkout = _checkout(options)
    for name in options.categories:
        if name not in CATEGORIES:
            raise UserError(f"--categories: there is no {name!r}; there are: {', '.join(CATEGORIES)}")
    return {
        "policy": {"model": options.model, "server": "asked by its address", **options.request},
        "package": f"vitabench {revision(checkout)}",
        "subset": {"name": options.subset, "tasks": _tasks(options), "domains": list(_domains(options))},
    }


def _domains(options: Options) -> tuple[str, ...]:
    return options.categories or CATEGORIES[:3]


def run(options: Options) -> dict[str, Any]:
    """Plays the domains asked for and reads what came of it."""
    known = about(options)
    checkout, domains = _checkout(options), _domains(options)
    attempts: dict[str, list[Attempt]] = {"judged": [], "proxy": []}
    for domain in domains:
        file = (options.out / f"vita_{domain.replace(',', '-')}.json").absolute()
        _play(checkout, domain, file, options)
        found = read_results(file, domain)
        for kind, own in found.items():
            attempts[kind] += own
    by_kind = {
        kind: {
            domain: category_figures([attempt for attempt in own if attempt.category == domain], options.trials)
            for domain in domains
        }
        for kind, own in attempts.items()
    }
    shown = {f"{kind} {domain}": row["score"] for kind, rows in by_kind.items() for domain, row in rows.items()}
    return {**known, "trials": options.trials, "seed": options.seed, **by_kind, "figures": shown}


def _checkout(options: Options) -> Path:
    """The checkout, once all that a run needs is there. Raises UserError."""
    if not options.vita_path:
        raise UserError(NEEDED)
    checkout = Path(options.vita_path).expanduser()
    if not (checkout / PACKAGE).is_dir():
        raise UserError(f"--vita_path={options.vita_path}: no checkout of VitaBench, which has {PACKAGE}/. {NEEDED}")
    if not options.server:
        raise UserError(
            "vita: VitaBench asks the policy by an address: start `python -m envace_jax.serve --model=PATH` and give "
            "--server=http://127.0.0.1:PORT/v1"
        )
    if not options.user_url or not options.user_model:
        raise UserError(
            "vita: its user and its judge are a language model: give one by --config.user.urls=http://HOST:PORT/v1 "
            "--config.user.model=NAME"
        )
    if options.model == options.user_model:
        raise UserError(
            f"vita: VitaBench tells its models apart by their names, and --model and --config.user.model are both "
            f"{options.model!r}: serve one of them by another name (`python -m envace_jax.serve --name=NAME`)"
        )
    return checkout.absolute()


def _play(checkout: Path, domain: str, file: Path, options: Options) -> None:
    """Runs VitaBench on a domain; it goes on with the file of an earlier run. Raises UserError with its last words."""
    file.parent.mkdir(parents=True, exist_ok=True)
    models = file.with_name("vita_models.json")  # JSON is YAML too
    write_json_atomic(models, model_file(options))
    python = os.environ.get(PYTHON_VARIABLE) or sys.executable
    command = [
        python, "-m", "vita.cli", "run", "--domain", domain, "--agent-llm", options.model,
        "--user-llm", options.user_model, "--evaluator-llm", options.user_model,
        "--num-trials", str(options.trials), "--seed", str(options.seed), "--save-to", str(file), *_tasks(options),
    ]  # fmt: skip
    variables = os.environ | {"VITA_MODEL_CONFIG_PATH": str(models), "PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(command, cwd=checkout, env=variables, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        said = " ".join(done.stderr.split())[-300:]
        raise UserError(f"vita: {domain}: VitaBench ended with exit status {done.returncode}: {said}")
    if not file.is_file():
        raise UserError(f"vita: {domain}: VitaBench left no results at {file}")


def _tasks(options: Options) -> list[str]:
    """Which tasks, as VitaBench takes it."""
    if options.subset in ("all", "small"):
        return [] if options.subset == "all" else ["--num-tasks", "5"]
    if options.subset.startswith("first:"):
        return ["--num-tasks", options.subset.removeprefix("first:")]
    path = Path(options.subset).expanduser()
    if not path.is_file():
        raise UserError(f"--subset={options.subset}: expected all, small, first:N, or a file with an id on each line")
    return ["--task-ids", *path.read_text(encoding="utf-8").split()]


def model_file(options: Options) -> dict[str, Json]:
    """VitaBench's list of models: it wants the whole address of chat completions, and sends what else stands beside a
    model's name along with every request to it."""

    def model(name: str, url: str, **fields: Json) -> dict[str, Json]:
        return {"name": name, "base_url": url.rstrip("/") + "/chat/completions", "max_tokens": 8000, **fields}

    headers = {"Content-Type": "application/json"}
    return {
        "default": {"headers": headers, "temperature": 0.0},
        "models": [
            model(options.model, options.server, **options.request),
            model(options.user_model, options.user_url),
        ],
    }


# --- what came of it ---


def read_results(file: Path, domain: str) -> dict[str, list[Attempt]]:
    """The attempts in a results file: `judged`, by VitaBench's reward, and `proxy`, by the orders in the end. Raises
    UserError where it is none."""
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        tasks = {task["id"]: task for task in held["tasks"]}
        simulations = [(tasks[one["task_id"]], one) for one in held["simulations"]]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file}: no results of VitaBench ({error!r})") from None
    found: dict[str, list[Attempt]] = {"judged": [], "proxy": []}
    for task, one in simulations:
        reward = (one.get("reward_info") or {}).get("reward")
        named: dict[str, Any] = {"case_id": str(task["id"]), "category": domain, "trial": int(one.get("trial") or 0)}
        # VitaBench writes no reward where its judge failed.
        found["judged"].append(Attempt(**named, score=None if reward is None else float(reward), masked=reward is None))
        required, final = required_orders(task), final_orders(one)
        known = required is not None and final is not None
        score = float(same_orders(final or [], required or [])) if known else None
        found["proxy"].append(Attempt(**named, score=score, masked=not known))
    return found


def required_orders(task: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The orders that a task requires, or None where it says nothing of them."""
    states = (task.get("evaluation_criteria") or {}).get("expected_states") or ()
    return _listed(states[0].get("required_orders")) if states else None


def final_orders(simulation: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The orders of a simulation's last state, or None where it says nothing of them."""
    states = simulation.get("states")
    last = states[-1] if isinstance(states, list) and states else states
    if not isinstance(last, Mapping):
        return None
    return next((_listed(last[name]) for name in ORDERS if last.get(name) is not None), None)


def _listed(orders: Any) -> list[Mapping[str, Any]] | None:
    """Orders in a list, or by their ids."""
    if isinstance(orders, Mapping):
        orders = list(orders.values())
    return orders if isinstance(orders, list) else None


def same_orders(final: Sequence[Mapping[str, Any]], required: Sequence[Mapping[str, Any]]) -> bool:
    """Whether there are these orders and no others, by what tells orders apart in those required."""
    fields = [field for field in FIELDS if any(field in order for order in required)]
    return collections.Counter(_key(order, fields) for order in final) == collections.Counter(
        _key(order, fields) for order in required
    )


def _key(order: Mapping[str, Any], fields: Sequence[str]) -> str:
    products = [
        json.dumps([product.get(field) for field in PRODUCT_FIELDS], ensure_ascii=False)
        for product in order.get("products") or ()
    ]
    return json.dumps([[order.get(field) for field in fields], sorted(products)], ensure_ascii=False)


def revision(checkout: Path) -> str:
    """The commit of a checkout, as far as it says so."""
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else "of no known commit"
