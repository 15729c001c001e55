"""Domain `shop`: items with a price and a stock. State: {item: {"price", "stock"}}. See scenes.py for REQUESTS."""

from __future__ import annotations

import random
from collections.abc import Mapping

from envace_jax.envs import function_schema
from envace_jax.envs.scenes import Scene, small_talk
from envace_jax.types import Json

ITEMS = (
    "lamp", "desk", "chair", "mug", "pen", "rug", "sofa", "clock", "vase", "bowl", "fork", "kettle",
    "towel", "mirror", "shelf", "basket", "candle", "broom", "bucket", "hammer", "ladder", "rope", "tent", "drum",
)  # fmt: skip
_ITEM = {"type": "string"}
TOOLS = (
    function_schema("price", item=_ITEM),
    function_schema("stock", item=_ITEM),
    function_schema("order", item=_ITEM, count={"type": "integer"}),
)
COUNTS = tuple(range(1, 6))
FIELDS = ("price", "stock", "total", "left")
ERRORS = ("unknown item", "out of stock", "bad count")
VALUES = {"item": ITEMS, "count": COUNTS}  # plausible arguments


def execute(state: Mapping[str, Json], name: str, arguments: Mapping[str, Json]) -> tuple[Mapping[str, Json], Json]:
    """Runs one well-formed call. Errors: unknown item, out of stock, bad count."""
    item = arguments["item"]
    if item not in state:
        return state, {"error": "unknown item"}
    entry = state[item]
    if name in ("price", "stock"):
        return state, {name: entry[name]}
    count = arguments["count"]
    if count <= 0:
        return state, {"error": "bad count"}
    if entry["stock"] < count:
        return state, {"error": "out of stock"}
    left = entry["stock"] - count
    return {**state, item: {**entry, "stock": left}}, {"total": entry["price"] * count, "left": left}


def sample_state(rng: random.Random) -> dict[str, Json]:
    """Four to six items; prices from 5 to 95 in steps of 5, stocks from 0 to 9."""
    items = rng.sample(ITEMS, rng.randint(4, 6))
    return {item: {"price": rng.randrange(5, 100, 5), "stock": rng.randint(0, 9)} for item in items}


def _pair(scene: Scene) -> tuple[str, str]:
    first, second = scene.rng.sample(sorted(scene.state), 2)
    return first, second


def _count(scene: Scene, item: str, possible: float) -> int:
    """A count that is in stock with about the given probability."""
    stock = scene.state[item]["stock"]
    within, beyond = [n for n in COUNTS if n <= stock], [n for n in COUNTS if n > stock]
    return scene.rng.choice((within if scene.rng.random() < possible else beyond) or COUNTS)


def _order(scene: Scene, item: str, count: int) -> None:
    """The order and its reply."""
    (result,) = scene.call(("order", {"item": item, "count": count}))
    if "error" in result:
        scene.say(f"the {item} is out of stock.", item, "out of stock")
    else:
        scene.say(f"ordered, the total is {result['total']}.", "ordered", result["total"])


def cost(scene: Scene) -> bool | None:
    item, _ = _pair(scene)
    scene.focus["item"] = item
    scene.ask(
        (
            "how much does the {a} cost here ?",
            "tell me the price of the {a} .",
            "what is the price for a {a} ?",
            "please look up the cost of the {a} .",
            "what do i pay for one {a} ?",
        ),
        a=item,
    )
    (result,) = scene.call(("price", {"item": item}))
    scene.say(f"the {item} costs {result['price']}.", item, result["price"])
    return None


def left(scene: Scene) -> bool | None:
    item, _ = _pair(scene)
    scene.focus["item"] = item
    scene.ask(
        (
            "how many of the {a} are left now ?",
            "is the {a} still in stock today ?",
            "tell me the stock of the {a} .",
            "check how many {a} you have left .",
            "what is left of the {a} today ?",
        ),
        a=item,
    )
    (result,) = scene.call(("stock", {"item": item}))
    scene.say(f"{result['stock']} {item} left.", result["stock"], item)
    return None


def cost_unknown(scene: Scene) -> bool | None:
    item = scene.rng.choice([item for item in ITEMS if item not in scene.state])
    scene.ask(
        (
            "how much does the {a} cost here ?",
            "tell me the price of the {a} .",
            "what is the price for a {a} ?",
            "please look up the cost of the {a} .",
        ),
        a=item,
    )
    scene.call(("price", {"item": item}))
    scene.say(f"there is no {item} here.", "no", item)
    return None


def cost_and_left(scene: Scene) -> bool | None:
    item, _ = _pair(scene)
    scene.focus["item"] = item
    scene.ask(
        (
            "what does the {a} cost and how many are left ?",
            "tell me the price and the stock of the {a} .",
            "price and stock of the {a} please .",
            "show me both cost and stock for the {a} .",
        ),
        a=item,
    )
    one, two = scene.call(("price", {"item": item}), ("stock", {"item": item}))
    scene.say(f"the {item} costs {one['price']}, {two['stock']} left.", item, one["price"], two["stock"])
    return None


def cheaper(scene: Scene) -> bool | None:
    first, second = _pair(scene)
    if scene.state[first]["price"] == scene.state[second]["price"]:
        return False
    scene.ask(
        (
            "which is cheaper , the {a} or the {b} ?",
            "does the {a} or the {b} cost less ?",
            "compare {a} and {b} , which one is cheaper ?",
            "tell me which costs less , {a} or {b} .",
        ),
        a=first,
        b=second,
    )
    one, two = scene.call(("price", {"item": first}), ("price", {"item": second}))
    item = first if one["price"] < two["price"] else second
    scene.focus["item"] = item
    scene.say(f"the {item} is cheaper.", item, "cheaper")
    return None


def order(scene: Scene) -> bool | None:
    item, _ = _pair(scene)
    count = _count(scene, item, possible=0.8)
    scene.ask(
        (
            "please order {n} of the {a} for me .",
            "i want to buy {n} of the {a} .",
            "order {n} pieces of the {a} now .",
            "get me {n} of the {a} please .",
        ),
        a=item,
        n=count,
    )
    scene.focus["item"] = item
    _order(scene, item, count)
    return None


def order_of_that(scene: Scene) -> bool | None:
    """Refers back to the item of an earlier turn."""
    item = scene.focus.get("item")
    if item is None:
        return False
    count = _count(scene, item, possible=0.8)
    scene.ask(
        (
            "good , order {n} of that one now .",
            "then buy {n} of it for me .",
            "ok , i take {n} of those please .",
            "now get me {n} of that one .",
        ),
        n=count,
    )
    _order(scene, item, count)
    return None


def order_if_left(scene: Scene) -> bool | None:
    """The stock decides whether to order."""
    item, _ = _pair(scene)
    count = _count(scene, item, possible=0.6)
    scene.ask(
        (
            "if there are at least {n} of the {a} order {n} .",
            "check the stock of the {a} , order {n} if possible .",
            "order {n} of the {a} only if so many are left .",
            "when {n} or more {a} are in stock buy {n} .",
        ),
        a=item,
        n=count,
    )
    (result,) = scene.call(("stock", {"item": item}))
    if result["stock"] >= count:
        _order(scene, item, count)
    else:
        scene.say(f"not enough, {result['stock']} {item} left.", "not enough", result["stock"], item)
    return None


def order_if_cheap(scene: Scene) -> bool | None:
    """The price decides whether to order."""
    item, _ = _pair(scene)
    limit = scene.rng.choice((20, 30, 40, 50, 60, 70))
    scene.ask(
        (
            "buy one {a} if it costs at most {m} .",
            "if the {a} is not over {m} order one .",
            "order one {a} only if the price is {m} or less .",
            "check the price of the {a} , buy one up to {m} .",
        ),
        a=item,
        m=limit,
    )
    (result,) = scene.call(("price", {"item": item}))
    if result["price"] <= limit:
        _order(scene, item, 1)
    else:
        scene.say(f"too much, the {item} costs {result['price']}.", "too much", item, result["price"])
    return None


def order_check(scene: Scene) -> bool | None:
    item, _ = _pair(scene)
    stock = scene.state[item]["stock"]
    if stock == 0:
        return False
    count = scene.rng.choice([n for n in COUNTS if n <= stock])
    scene.ask(
        (
            "order {n} of the {a} , then check the stock .",
            "buy {n} of the {a} and tell me the stock after .",
            "get me {n} {a} , what is the stock then ?",
            "order {n} {a} , then show me the stock again .",
        ),
        a=item,
        n=count,
    )
    scene.call(("order", {"item": item, "count": count}))
    (result,) = scene.call(("stock", {"item": item}))
    scene.focus["item"] = item
    scene.say(f"{result['stock']} {item} left.", result["stock"], item)
    return None


def order_cheaper(scene: Scene) -> bool | None:
    """Two prices decide what to order."""
    first, second = _pair(scene)
    if scene.state[first]["price"] == scene.state[second]["price"]:
        return False
    item = min((first, second), key=lambda item: scene.state[item]["price"])
    count = _count(scene, item, possible=0.8)
    scene.ask(
        (
            "order {n} of the cheaper one , {a} or {b} .",
            "compare {a} and {b} , buy {n} of the cheaper .",
            "of {a} and {b} get me {n} of the cheaper .",
            "buy {n} {a} or {b} , whichever costs less .",
        ),
        a=first,
        b=second,
        n=count,
    )
    scene.call(("price", {"item": first}), ("price", {"item": second}))
    _order(scene, item, count)
    return None


REQUESTS = (
    (1.2, cost),
    (1.2, left),
    (0.6, cost_unknown),
    (1.2, cost_and_left),
    (1.0, cheaper),
    (1.0, order),
    (2.5, order_of_that),
    (1.5, order_if_left),
    (1.5, order_if_cheap),
    (1.5, order_check),
    (1.5, order_cheaper),
    (0.7, small_talk),
)
