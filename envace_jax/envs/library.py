"""Domain `library`: books with copies to lend; never used in RL. State: {book: {"copies", "lent": [names]}}."""

from __future__ import annotations

import random
from collections.abc import Mapping

from envace_jax.envs import function_schema
from envace_jax.envs.scenes import NAMES, Scene, small_talk
from envace_jax.types import Json

BOOKS = (
    "atlas", "dune", "emma", "hamlet", "ulysses", "walden", "dracula", "faust", "heidi", "iliad", "odyssey", "utopia",
    "solaris", "stoner", "rebecca", "candide", "ivanhoe", "carrie", "dubliners", "typee", "macbeth", "othello",
    "persuasion", "poems",
)  # fmt: skip
_BOOK, _NAME = {"type": "string"}, {"type": "string"}
TOOLS = (
    function_schema("find", book=_BOOK),
    function_schema("borrow", book=_BOOK, name=_NAME),
    function_schema("return", book=_BOOK, name=_NAME),
)
FIELDS = ("copies", "left")
ERRORS = ("unknown book", "has it", "none left", "not lent")
VALUES = {"book": BOOKS, "name": NAMES}  # plausible arguments


def execute(state: Mapping[str, Json], name: str, arguments: Mapping[str, Json]) -> tuple[Mapping[str, Json], Json]:
    """Runs one well-formed call. Errors: unknown book, none left, has it (already), not lent."""
    book = arguments["book"]
    if book not in state:
        return state, {"error": "unknown book"}
    copies, lent = state[book]["copies"], state[book]["lent"]
    if name == "find":
        return state, {"copies": copies}
    who = arguments["name"]
    if name == "borrow":
        if who in lent:
            return state, {"error": "has it"}
        if copies == 0:
            return state, {"error": "none left"}
        return {**state, book: {"copies": copies - 1, "lent": sorted([*lent, who])}}, {"left": copies - 1}
    if who not in lent:
        return state, {"error": "not lent"}
    return {**state, book: {"copies": copies + 1, "lent": [name for name in lent if name != who]}}, {"left": copies + 1}


def sample_state(rng: random.Random) -> dict[str, Json]:
    """Four to six books; 0 to 5 copies here, 0 to 2 lent."""
    books = rng.sample(BOOKS, rng.randint(4, 6))
    return {book: {"copies": rng.randint(0, 5), "lent": sorted(rng.sample(NAMES, rng.randint(0, 2)))} for book in books}


def _pair(scene: Scene) -> tuple[str, str]:
    first, second = scene.rng.sample(sorted(scene.state), 2)
    return first, second


def _new_reader(scene: Scene, book: str) -> str:
    return scene.rng.choice([name for name in NAMES if name not in scene.state[book]["lent"]])


def _borrow(scene: Scene, book: str, name: str) -> None:
    """The loan and its reply."""
    (result,) = scene.call(("borrow", {"book": book, "name": name}))
    if "error" in result:
        scene.say(f"no copy of {book} is left.", "no copy", book)
    else:
        scene.say(f"done, {result['left']} {book} left.", "done", result["left"], book)


def find(scene: Scene) -> bool | None:
    book, _ = _pair(scene)
    scene.focus["book"] = book
    scene.ask(
        (
            "how many copies of {k} are here now ?",
            "is the book {k} here right now ?",
            "tell me how many {k} you have .",
            "please look for the book {k} .",
            "do you have {k} on the shelf ?",
        ),
        k=book,
    )
    (result,) = scene.call(("find", {"book": book}))
    scene.say(f"{result['copies']} {book} here.", result["copies"], book)
    return None


def find_unknown(scene: Scene) -> bool | None:
    book = scene.rng.choice([book for book in BOOKS if book not in scene.state])
    scene.ask(
        (
            "how many copies of {k} are here now ?",
            "is the book {k} here right now ?",
            "tell me how many {k} you have .",
            "please look for the book {k} .",
        ),
        k=book,
    )
    scene.call(("find", {"book": book}))
    scene.say(f"there is no {book} here.", "no", book)
    return None


def find_two(scene: Scene) -> bool | None:
    first, second = _pair(scene)
    scene.ask(
        (
            "how many copies of {k} and {l} are here ?",
            "please look for both {k} and {l} .",
            "tell me how many {k} and {l} you have .",
            "do you have {k} and {l} on the shelf ?",
        ),
        k=first,
        l=second,
    )
    one, two = scene.call(("find", {"book": first}), ("find", {"book": second}))
    words = (one["copies"], first, two["copies"], second)
    scene.say(f"{one['copies']} {first}, {two['copies']} {second} here.", *words)
    return None


def borrow_of_that(scene: Scene) -> bool | None:
    """Refers back to the book of an earlier turn."""
    book = scene.focus.get("book")
    if book is None:
        return False
    name = _new_reader(scene, book)
    scene.ask(
        (
            "good , lend that one to {a} .",
            "then {a} wants to borrow it .",
            "ok , give that book to {a} .",
            "now let {a} take that book .",
        ),
        a=name,
    )
    _borrow(scene, book, name)
    return None


def borrow_if(scene: Scene) -> bool | None:
    """The copies decide whether to lend."""
    book, _ = _pair(scene)
    name, least = _new_reader(scene, book), scene.rng.choice((1, 2, 3))
    scene.ask(
        (
            "if at least {n} of {k} are here lend one to {a} .",
            "check {k} , lend it to {a} if {n} or more are here .",
            "lend {k} to {a} only if you have at least {n} .",
            "when {n} or more {k} are here give one to {a} .",
        ),
        k=book,
        a=name,
        n=least,
    )
    (result,) = scene.call(("find", {"book": book}))
    if result["copies"] >= least:
        _borrow(scene, book, name)
    else:
        scene.say(f"not enough, {result['copies']} {book} here.", "not enough", result["copies"], book)
    return None


def borrow_more(scene: Scene) -> bool | None:
    """Two counts decide which book to lend."""
    first, second = _pair(scene)
    if scene.state[first]["copies"] == scene.state[second]["copies"]:
        return False
    book = max((first, second), key=lambda book: scene.state[book]["copies"])
    name = _new_reader(scene, book)
    scene.ask(
        (
            "lend {a} the one with more copies , {k} or {l} .",
            "compare {k} and {l} , lend {a} the more common .",
            "of {k} and {l} lend {a} what you have more of .",
            "give {a} {k} or {l} , whichever has more copies .",
        ),
        k=first,
        l=second,
        a=name,
    )
    scene.call(("find", {"book": first}), ("find", {"book": second}))
    _borrow(scene, book, name)
    return None


def bring_back(scene: Scene) -> bool | None:
    """A return, then a look at the shelf."""
    books = [book for book, entry in scene.state.items() if entry["lent"]]
    if not books:
        return False
    book = scene.rng.choice(books)
    name = scene.rng.choice(scene.state[book]["lent"])
    scene.ask(
        (
            "{a} brings back {k} , how many are here then ?",
            "take {k} back from {a} , then look for it .",
            "return {k} for {a} and tell me the copies .",
            "{a} returns {k} , then check the shelf .",
        ),
        k=book,
        a=name,
    )
    scene.call(("return", {"book": book, "name": name}))
    (result,) = scene.call(("find", {"book": book}))
    scene.focus["book"] = book
    scene.say(f"{result['copies']} {book} here.", result["copies"], book)
    return None


def swap(scene: Scene) -> bool | None:
    """A return and a loan side by side."""
    books = [book for book, entry in scene.state.items() if entry["lent"]]
    if not books:
        return False
    book = scene.rng.choice(books)
    other = scene.rng.choice([other for other in sorted(scene.state) if other != book])
    names = [name for name in scene.state[book]["lent"] if name not in scene.state[other]["lent"]]
    if not names or scene.state[other]["copies"] == 0:
        return False
    name = scene.rng.choice(names)
    scene.ask(
        (
            "{a} brings back {k} and takes {l} instead .",
            "swap {k} for {l} , {a} asks for it .",
            "take {k} back from {a} and lend out {l} .",
            "{a} wants {l} now and returns {k} .",
        ),
        k=book,
        l=other,
        a=name,
    )
    one, two = scene.call(("return", {"book": book, "name": name}), ("borrow", {"book": other, "name": name}))
    words = (one["left"], book, two["left"], other)
    scene.say(f"{one['left']} {book}, {two['left']} {other} here.", *words)
    return None


REQUESTS = (
    (1.2, find),
    (0.6, find_unknown),
    (1.0, find_two),
    (2.5, borrow_of_that),
    (2.0, borrow_if),
    (1.5, borrow_more),
    (1.5, bring_back),
    (1.2, swap),
    (0.7, small_talk),
)
