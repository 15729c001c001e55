"""Domain `calendar`: days with bookable hours. State: {day: {hour text: name or null}}. See scenes.py for REQUESTS."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from envace_jax.envs import function_schema
from envace_jax.envs.scenes import NAMES, Scene, small_talk
from envace_jax.types import Json

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = tuple(range(8, 18))
_DAY, _HOUR = {"type": "string"}, {"type": "integer"}
TOOLS = (
    function_schema("free", day=_DAY),
    function_schema("book", day=_DAY, hour=_HOUR, name={"type": "string"}),
    function_schema("cancel", day=_DAY, hour=_HOUR),
)
FIELDS = ("free", "booked", "cancelled")
ERRORS = ("unknown day", "closed", "taken", "not booked")
VALUES = {"day": DAYS, "hour": HOURS, "name": NAMES}  # plausible arguments


def execute(state: Mapping[str, Json], name: str, arguments: Mapping[str, Json]) -> tuple[Mapping[str, Json], Json]:
    """Runs one well-formed call. Errors: unknown day, closed (no such hour), taken, not booked."""
    day = arguments["day"]
    if day not in state:
        return state, {"error": "unknown day"}
    slots = state[day]
    if name == "free":
        return state, {"free": [int(hour) for hour, holder in slots.items() if holder is None]}
    hour = str(arguments["hour"])
    if hour not in slots:
        return state, {"error": "closed"}
    holder = slots[hour]
    if name == "cancel":
        if holder is None:
            return state, {"error": "not booked"}
        return {**state, day: {**slots, hour: None}}, {"cancelled": holder}
    if holder is not None:
        return state, {"error": "taken"}
    return {**state, day: {**slots, hour: arguments["name"]}}, {"booked": arguments["name"]}


def sample_state(rng: random.Random) -> dict[str, Json]:
    """Three days of four hours each; a little over half of the hours are booked."""
    state: dict[str, Json] = {}
    for day in sorted(rng.sample(DAYS, 3), key=DAYS.index):
        hours = sorted(rng.sample(HOURS, 4))
        state[day] = {str(hour): rng.choice(NAMES) if rng.random() < 0.55 else None for hour in hours}
    return state


def _day(scene: Scene) -> str:
    return scene.rng.choice(list(scene.state))


def _slots(scene: Scene, booked: bool) -> list[tuple[str, int]]:
    """All booked, or all free, (day, hour) pairs."""
    return [
        (day, int(hour))
        for day, slots in scene.state.items()
        for hour, holder in slots.items()
        if (holder is not None) == booked
    ]


def _free_text(day: str, hours: Sequence[int]) -> str:
    return f"{day} is free at {', '.join(str(hour) for hour in hours)}." if hours else f"{day} is full."


def _free_words(day: str, hours: Sequence[int]) -> tuple[Json, ...]:
    return (day, *hours) if hours else (day, "full")


def _book(scene: Scene, day: str, hour: int, name: str) -> None:
    """The booking and its reply."""
    (result,) = scene.call(("book", {"day": day, "hour": hour, "name": name}))
    scene.focus.update(day=day, hour=hour)
    if "error" in result:
        scene.say(f"{day} at {hour} is taken.", day, hour, "taken")
    else:
        scene.say(f"booked {day} at {hour} for {name}.", "booked", day, hour, name)


def when(scene: Scene) -> bool | None:
    day = _day(scene)
    scene.ask(
        (
            "when is there time on {d} please ?",
            "which hours are free on {d} now ?",
            "tell me the free hours on {d} .",
            "show me what is open on {d} .",
            "what times can i get on {d} ?",
        ),
        d=day,
    )
    (result,) = scene.call(("free", {"day": day}))
    scene.focus.update(open_day=day, open_hours=result["free"])
    scene.say(_free_text(day, result["free"]), *_free_words(day, result["free"]))
    return None


def when_two(scene: Scene) -> bool | None:
    first, second = scene.rng.sample(list(scene.state), 2)
    scene.ask(
        (
            "which hours are free on {d} and on {e} ?",
            "when is there time on {d} and {e} ?",
            "tell me the free hours on {d} and {e} .",
            "show me what is open on {d} and {e} .",
        ),
        d=first,
        e=second,
    )
    one, two = scene.call(("free", {"day": first}), ("free", {"day": second}))
    words = _free_words(first, one["free"]) + _free_words(second, two["free"])
    scene.say(f"{_free_text(first, one['free'])} {_free_text(second, two['free'])}", *words)
    return None


def book(scene: Scene) -> bool | None:
    """A booking that is sometimes refused."""
    slots = _slots(scene, booked=scene.rng.random() < 0.25)
    if not slots:
        return False
    (day, hour), name = scene.rng.choice(slots), scene.rng.choice(NAMES)
    scene.ask(
        (
            "please book {d} at {h} for {a} .",
            "put {a} down for {d} at {h} .",
            "reserve {d} at {h} for {a} please .",
            "{a} wants to come {d} at {h} .",
        ),
        d=day,
        h=hour,
        a=name,
    )
    _book(scene, day, hour, name)
    return None


def book_closed(scene: Scene) -> bool | None:
    """An hour that the day does not have."""
    day, name = _day(scene), scene.rng.choice(NAMES)
    hour = scene.rng.choice([hour for hour in HOURS if str(hour) not in scene.state[day]])
    scene.ask(
        (
            "please book {d} at {h} for {a} .",
            "put {a} down for {d} at {h} .",
            "reserve {d} at {h} for {a} please .",
            "{a} wants to come {d} at {h} .",
        ),
        d=day,
        h=hour,
        a=name,
    )
    scene.call(("book", {"day": day, "hour": hour, "name": name}))
    scene.say(f"{day} at {hour} is closed.", day, hour, "closed")
    return None


def book_first(scene: Scene) -> bool | None:
    """The free hours decide which one to book, or that there is none."""
    day, name = _day(scene), scene.rng.choice(NAMES)
    scene.ask(
        (
            "book the first free hour on {d} for {a} .",
            "give {a} the first open hour on {d} .",
            "find the first free time on {d} and book {a} .",
            "put {a} in the earliest free slot on {d} .",
        ),
        d=day,
        a=name,
    )
    (result,) = scene.call(("free", {"day": day}))
    if result["free"]:
        _book(scene, day, result["free"][0], name)
    else:
        scene.say(f"{day} is full.", day, "full")
    return None


def book_last(scene: Scene) -> bool | None:
    """As `book_first`, from the other end."""
    day, name = _day(scene), scene.rng.choice(NAMES)
    scene.ask(
        (
            "book the last free hour on {d} for {a} .",
            "give {a} the last open hour on {d} .",
            "find the last free time on {d} and book {a} .",
            "put {a} in the latest free slot on {d} .",
        ),
        d=day,
        a=name,
    )
    (result,) = scene.call(("free", {"day": day}))
    if result["free"]:
        _book(scene, day, result["free"][-1], name)
    else:
        scene.say(f"{day} is full.", day, "full")
    return None


def book_if(scene: Scene) -> bool | None:
    """The free hours decide whether to book."""
    slots = _slots(scene, booked=scene.rng.random() < 0.4)
    if not slots:
        return False
    (day, hour), name = scene.rng.choice(slots), scene.rng.choice(NAMES)
    scene.ask(
        (
            "if {d} at {h} is free book it for {a} .",
            "check {d} first , book {h} for {a} if free .",
            "book {a} on {d} at {h} only if it is free .",
            "when {h} on {d} is still open give it to {a} .",
        ),
        d=day,
        h=hour,
        a=name,
    )
    (result,) = scene.call(("free", {"day": day}))
    if hour in result["free"]:
        _book(scene, day, hour, name)
    else:
        scene.say(f"{day} at {hour} is not free.", day, hour, "not free")
    return None


def book_of_those(scene: Scene) -> bool | None:
    """Refers back to the free hours of an earlier turn."""
    day = scene.focus.pop("open_day", None)
    if not day or not scene.focus["open_hours"]:
        return False
    hour, name = scene.focus["open_hours"][0], scene.rng.choice(NAMES)
    if scene.state[day][str(hour)] is not None:
        return False
    scene.ask(
        (
            "good , book the first of those for {a} .",
            "then give the first one to {a} .",
            "ok , {a} takes the first of them .",
            "now put {a} in the first of those .",
        ),
        a=name,
    )
    _book(scene, day, hour, name)
    return None


def cancel(scene: Scene) -> bool | None:
    """A cancellation that sometimes finds nothing to cancel."""
    slots = _slots(scene, booked=scene.rng.random() < 0.75)
    if not slots:
        return False
    day, hour = scene.rng.choice(slots)
    scene.ask(
        (
            "please cancel the {h} slot on {d} .",
            "cancel what is on {d} at {h} .",
            "drop the booking on {d} at {h} .",
            "free up {d} at {h} for me .",
        ),
        d=day,
        h=hour,
    )
    (result,) = scene.call(("cancel", {"day": day, "hour": hour}))
    if "error" in result:
        scene.say(f"{day} at {hour} was not booked.", day, hour, "not booked")
    else:
        scene.say(f"cancelled {day} at {hour} for {result['cancelled']}.", "cancelled", day, hour, result["cancelled"])
    return None


def cancel_that(scene: Scene) -> bool | None:
    """Refers back to the booking of an earlier turn."""
    day, hour = scene.focus.get("day"), scene.focus.get("hour")
    if day is None or scene.state[day][str(hour)] is None:
        return False
    scene.ask(
        (
            "sorry , please cancel that one again .",
            "oh no , cancel that booking please .",
            "that was wrong , please cancel it .",
            "now drop that booking again please .",
        )
    )
    (result,) = scene.call(("cancel", {"day": day, "hour": hour}))
    scene.say(f"cancelled {day} at {hour} for {result['cancelled']}.", "cancelled", day, hour, result["cancelled"])
    return None


def move(scene: Scene) -> bool | None:
    """The cancelled name is what must be booked again."""
    taken, free = _slots(scene, booked=True), _slots(scene, booked=False)
    if not taken or not free:
        return False
    (day, hour), (new_day, new_hour) = scene.rng.choice(taken), scene.rng.choice(free)
    scene.ask(
        (
            "move the booking on {d} at {h} to {e} at {i} .",
            "shift {d} at {h} over to {e} at {i} .",
            "cancel {d} at {h} and book it on {e} at {i} .",
            "put the one on {d} at {h} on {e} at {i} .",
        ),
        d=day,
        h=hour,
        e=new_day,
        i=new_hour,
    )
    (result,) = scene.call(("cancel", {"day": day, "hour": hour}))
    _book(scene, new_day, new_hour, result["cancelled"])
    return None


REQUESTS = (
    (1.2, when),
    (1.0, when_two),
    (0.8, book),
    (0.4, book_closed),
    (1.5, book_first),
    (1.2, book_last),
    (1.5, book_if),
    (2.5, book_of_those),
    (0.8, cancel),
    (2.0, cancel_that),
    (1.5, move),
    (0.7, small_talk),
)
