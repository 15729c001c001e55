"""Domain `accounts`: named accounts with whole balances. State: {name: balance}. See scenes.py for REQUESTS."""

from __future__ import annotations

import random
from collections.abc import Mapping

from envace_jax.envs import function_schema
from envace_jax.envs.scenes import NAMES, Scene, small_talk
from envace_jax.types import Json

_NAME = {"type": "string"}
_AMOUNT = {"type": "integer"}
TOOLS = (
    function_schema("balance", name=_NAME),
    function_schema("transfer", source=_NAME, target=_NAME, amount=_AMOUNT),
    function_schema("deposit", name=_NAME, amount=_AMOUNT),
)
AMOUNTS = tuple(range(10, 210, 10))
FIELDS = ("balance",)
ERRORS = ("unknown account", "not enough", "bad amount")
VALUES = {"name": NAMES, "source": NAMES, "target": NAMES, "amount": AMOUNTS}  # plausible arguments


def execute(state: Mapping[str, int], name: str, arguments: Mapping[str, Json]) -> tuple[Mapping[str, int], Json]:
    """Runs one well-formed call. Errors: unknown account, not enough, bad amount."""
    if name == "balance":
        who = arguments["name"]
        return state, {"balance": state[who]} if who in state else {"error": "unknown account"}
    amount = arguments["amount"]
    if amount <= 0:
        return state, {"error": "bad amount"}
    if name == "deposit":
        who = arguments["name"]
        if who not in state:
            return state, {"error": "unknown account"}
        return {**state, who: state[who] + amount}, {"balance": state[who] + amount}
    source, target = arguments["source"], arguments["target"]
    if source not in state or target not in state:
        return state, {"error": "unknown account"}
    if state[source] < amount:
        return state, {"error": "not enough"}
    after = {**state, source: state[source] - amount}
    after[target] += amount
    return after, {"balance": after[source]}


def sample_state(rng: random.Random) -> dict[str, int]:
    """Four to six accounts with balances from 10 to 300."""
    return {name: rng.randrange(10, 310, 10) for name in rng.sample(NAMES, rng.randint(4, 6))}


def _pair(scene: Scene) -> tuple[str, str]:
    first, second = scene.rng.sample(sorted(scene.state), 2)
    return first, second


def _amount(scene: Scene, source: str, possible: float) -> int:
    """An amount that `source` can pay with about the given probability."""
    within = [amount for amount in AMOUNTS if amount <= scene.state[source]]
    beyond = [amount for amount in AMOUNTS if amount > scene.state[source]]
    return scene.rng.choice((within if scene.rng.random() < possible else beyond) or AMOUNTS)


def _pay(scene: Scene, source: str, target: str, amount: int) -> None:
    """The transfer and its reply."""
    (result,) = scene.call(("transfer", {"source": source, "target": target, "amount": amount}))
    if "error" in result:
        scene.say(f"{source} has not enough.", source, "not enough")
    else:
        scene.say(f"done, {source} has {result['balance']} left.", "done", source, result["balance"])


def check(scene: Scene) -> bool | None:
    (name, _) = _pair(scene)
    scene.focus["name"] = name
    scene.ask(
        (
            "how much money does {a} have now ?",
            "tell me the balance of {a} please .",
            "what is in the account of {a} ?",
            "please check how much {a} has .",
            "show me what {a} has right now .",
        ),
        a=name,
    )
    (result,) = scene.call(("balance", {"name": name}))
    scene.say(f"{name} has {result['balance']}.", name, result["balance"])
    return None


def check_unknown(scene: Scene) -> bool | None:
    name = scene.rng.choice([name for name in NAMES if name not in scene.state])
    scene.ask(
        (
            "how much money does {a} have now ?",
            "tell me the balance of {a} please .",
            "what is in the account of {a} ?",
            "please check how much {a} has .",
        ),
        a=name,
    )
    scene.call(("balance", {"name": name}))
    scene.say(f"there is no account for {name}.", "no account", name)
    return None


def check_two(scene: Scene) -> bool | None:
    first, second = _pair(scene)
    scene.ask(
        (
            "how much do {a} and {b} have now ?",
            "tell me the balances of {a} and {b} .",
            "check the accounts of {a} and {b} please .",
            "show me what {a} and {b} have .",
        ),
        a=first,
        b=second,
    )
    one, two = scene.call(("balance", {"name": first}), ("balance", {"name": second}))
    scene.say(
        f"{first} has {one['balance']}, {second} has {two['balance']}.", first, one["balance"], second, two["balance"]
    )
    return None


def richer(scene: Scene) -> bool | None:
    first, second = _pair(scene)
    if scene.state[first] == scene.state[second]:
        return False
    scene.ask(
        (
            "who has more money , {a} or {b} ?",
            "which one is richer , {a} or {b} ?",
            "tell me who has more , {a} or {b} .",
            "compare {a} and {b} , who has more ?",
        ),
        a=first,
        b=second,
    )
    one, two = scene.call(("balance", {"name": first}), ("balance", {"name": second}))
    name = first if one["balance"] > two["balance"] else second
    scene.focus["name"] = name
    scene.say(f"{name} has more.", name, "more")
    return None


def send(scene: Scene) -> bool | None:
    source, target = _pair(scene)
    amount = _amount(scene, source, possible=0.8)
    scene.ask(
        (
            "send {n} from {a} to {b} please .",
            "please move {n} from {a} to {b} .",
            "transfer {n} from {a} to {b} now .",
            "let {a} pay {n} to {b} .",
            "give {b} {n} from {a} please .",
        ),
        a=source,
        b=target,
        n=amount,
    )
    scene.focus["name"] = target
    _pay(scene, source, target, amount)
    return None


def send_of_that(scene: Scene) -> bool | None:
    """Refers back to the account of an earlier turn."""
    source = scene.focus.get("name")
    if source is None:
        return False
    target = scene.rng.choice(sorted(set(scene.state) - {source}))
    amount = _amount(scene, source, possible=0.8)
    scene.ask(
        (
            "now send {n} of that to {b} .",
            "give {n} of that money to {b} .",
            "then move {n} of it to {b} .",
            "from that account pay {n} to {b} .",
        ),
        b=target,
        n=amount,
    )
    _pay(scene, source, target, amount)
    return None


def send_if(scene: Scene) -> bool | None:
    """The balance decides whether to transfer."""
    source, target = _pair(scene)
    amount = _amount(scene, source, possible=0.6)
    scene.ask(
        (
            "if {a} has at least {n} send it to {b} .",
            "check {a} first , then send {n} to {b} if possible .",
            "send {n} from {a} to {b} only if {a} has enough .",
            "when {a} has {n} or more , send {n} to {b} .",
        ),
        a=source,
        b=target,
        n=amount,
    )
    (result,) = scene.call(("balance", {"name": source}))
    if result["balance"] >= amount:
        _pay(scene, source, target, amount)
    else:
        scene.say(f"not enough, {source} has {result['balance']}.", "not enough", source, result["balance"])
    return None


def send_check(scene: Scene) -> bool | None:
    source, target = _pair(scene)
    amount = _amount(scene, source, possible=1.0)
    if scene.state[source] < amount:
        return False
    scene.ask(
        (
            "send {n} from {a} to {b} , then check {b} .",
            "move {n} from {a} to {b} and show me {b} after .",
            "let {a} pay {n} to {b} , what does {b} have then ?",
            "transfer {n} from {a} to {b} , then tell me about {b} .",
        ),
        a=source,
        b=target,
        n=amount,
    )
    scene.call(("transfer", {"source": source, "target": target, "amount": amount}))
    (result,) = scene.call(("balance", {"name": target}))
    scene.focus["name"] = target
    scene.say(f"{target} has {result['balance']}.", target, result["balance"])
    return None


def top_up(scene: Scene) -> bool | None:
    """The balance decides whether to deposit."""
    (name, _) = _pair(scene)
    limit, amount = scene.rng.choice((50, 100, 150, 200)), scene.rng.choice(AMOUNTS[:10])
    scene.ask(
        (
            "if {a} has under {m} add {n} to it .",
            "add {n} to {a} if there is under {m} .",
            "check {a} and add {n} when under {m} .",
            "put {n} on {a} only if under {m} .",
        ),
        a=name,
        m=limit,
        n=amount,
    )
    (result,) = scene.call(("balance", {"name": name}))
    if result["balance"] < limit:
        (result,) = scene.call(("deposit", {"name": name, "amount": amount}))
        scene.say(f"done, {name} has {result['balance']}.", "done", name, result["balance"])
    else:
        scene.say(f"no need, {name} has {result['balance']}.", "no need", name, result["balance"])
    scene.focus["name"] = name
    return None


def add_two(scene: Scene) -> bool | None:
    first, second = _pair(scene)
    amount = scene.rng.choice(AMOUNTS[:10])
    scene.ask(
        (
            "add {n} to both {a} and {b} please .",
            "give {n} each to {a} and {b} .",
            "put {n} on the accounts of {a} and {b} .",
            "deposit {n} for {a} and also for {b} .",
        ),
        a=first,
        b=second,
        n=amount,
    )
    calls = [("deposit", {"name": name, "amount": amount}) for name in (first, second)]
    one, two = scene.call(*calls)
    scene.say(
        f"{first} has {one['balance']}, {second} has {two['balance']}.", first, one["balance"], second, two["balance"]
    )
    return None


def level(scene: Scene) -> bool | None:
    """Two balances decide the direction of the transfer."""
    first, second = _pair(scene)
    rich, poor = sorted((first, second), key=lambda name: -scene.state[name])
    amounts = [amount for amount in AMOUNTS if amount <= scene.state[rich]]
    if scene.state[rich] == scene.state[poor] or not amounts:
        return False
    amount = scene.rng.choice(amounts)
    scene.ask(
        (
            "of {a} and {b} , let the richer send {n} to the other .",
            "compare {a} and {b} , the richer one pays the other {n} .",
            "move {n} from the richer of {a} and {b} to the other .",
            "whoever has more , {a} or {b} , sends the other {n} .",
        ),
        a=first,
        b=second,
        n=amount,
    )
    scene.call(("balance", {"name": first}), ("balance", {"name": second}))
    _pay(scene, rich, poor, amount)
    return None


REQUESTS = (
    (1.5, check),
    (0.6, check_unknown),
    (1.0, check_two),
    (1.0, richer),
    (1.2, send),
    (2.5, send_of_that),
    (2.0, send_if),
    (1.5, send_check),
    (1.5, top_up),
    (1.0, add_two),
    (1.5, level),
    (0.7, small_talk),
)
