"""Fuzz of everything that reads what a model wrote: no exception escapes, nothing is invented, time grows with length.

Texts are made of known pieces and then damaged, from a seed. What a parser says it found is looked for in the text by
code that shares nothing with it: it tries every opening tag with every closing one.
"""

from __future__ import annotations

import json
import random
import re
import statistics
import time

import pytest

from envace_jax import json_values
from envace_jax.chat import parse_assistant
from envace_jax.rewards.checklist import says
from envace_jax.rewards.judge import read_verdicts
from envace_jax.roles import parse_rehearsal

FEW, MANY = 5_000, 100_000  # texts
TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<execution_result>", "</execution_result>", "<|im_end|>")
NAMES = ("balance", "größe", "a b", "x" * 60, "\\", '"', "</tool_call>", "null")
VALUES = (
    1, -0.5, True, None, "", "120", [], {}, [1, [2, {"a": []}]], {"a": {"b": [None]}}, "</tool_call>", "<tool_call>",
    "</execution_result>", "<think>", "\n", "🌧", "\u2028", 10**40, {"name": "y", "arguments": {}},
)  # fmt: skip
RAW = (
    "NaN", "-Infinity", "1e999", "-", "01", "9" * 4400, "9" * 400 + ".5", '"\\ud800"', '"\\u12"', "{", "}", "[", "]",
    '{"a": 1, "a": 2}', "[" * 70 + "]" * 70,
    '{"a":' * 150 + "1" + "}" * 150, "'", "\\", '\\"', "\0", "\ufeff", "\ud800",
    '{"name": "b", "arguments": "{\\"a\\": 1}"}', '{"name": "b", "arguments": "{\\"a\\": NaN}"}', "```json\n{}\n```",
    '{"verdicts": [[true]]}', "true", "false", "null", "\t\r\n \u00a0", '{"name": "b", "name": "c", "arguments": {}}',
)  # fmt: skip


def some_call(rng):
    arguments = {rng.choice(NAMES): rng.choice(VALUES) for _ in range(rng.randrange(3))}
    return json.dumps({"name": rng.choice(NAMES), "arguments": arguments}, ensure_ascii=rng.random() < 0.5)


def some_result(rng):
    value = rng.choice([{}, [], {"balance": 120}, {"a": rng.choice(VALUES)}, [rng.choice(VALUES)], rng.choice(VALUES)])
    return json.dumps(value, ensure_ascii=rng.random() < 0.5)


def piece(rng):
    kind = rng.randrange(8)
    if kind < 2:
        return f"<tool_call>\n{some_call(rng)}\n</tool_call>"
    if kind == 2:
        return f"<execution_result>\n{some_result(rng)}\n</execution_result>"
    if kind == 3:
        return (
            f"<think>\n{rng.choice(['hm', some_call(rng), '<tool_call>' + some_call(rng) + '</tool_call>'])}</think>\n"
        )
    if kind == 4:
        rows = [[rng.random() < 0.5 for _ in range(2)] for _ in range(rng.randrange(1, 4))]
        return json.dumps({"verdicts": rows})
    return (rng.choice(TAGS), rng.choice(RAW), "bob has 120. ")[kind - 5]


def damaged(rng, text):
    """The text after one mutation."""
    one, two = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    two = min(two, one + rng.choice((1, 3, 12, 40)))
    kind = rng.randrange(9)
    if kind == 0:
        return text[:one] + text[two:]  # cut out
    if kind == 1:
        return text[:one]  # cut off
    if kind == 2:
        return text[:two] + text[one:two] * rng.randrange(1, 4) + text[two:]  # doubled
    if kind == 3:
        return text[two:] + text[one:two] + text[:one]  # swapped
    if kind == 4:
        return text[:one] + rng.choice(TAGS) + text[one:]  # a tag, in the middle of anything
    if kind == 5:
        return text[:one] + rng.choice(RAW) + text[one:]
    if kind == 6:
        return text[:one] + "".join(chr(rng.randrange(0x110000)) for _ in range(3)) + text[two:]  # surrogates too
    if kind == 7:
        raw = bytearray(text.encode("utf-8", "surrogatepass"))
        for _ in range(3):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        return raw.decode("utf-8", "replace")
    return text[:one] + json.dumps(text[one:two])[1:-1] + text[two:]  # escaped once more


def texts(count, seed):
    """`count` seeded texts, one in five undamaged."""
    rng = random.Random(seed)
    for _ in range(count):
        text = "".join(piece(rng) for _ in range(rng.randrange(1, 6)))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            text = damaged(rng, text) if text else text
        yield text


# --- what may be found, by trying everything ---


def between(text, opening, closing):
    """(start, end, value) of every JSON value that fills the space from some opening tag to some closing one."""
    starts = [match.end() for match in re.finditer(re.escape(opening), text)]
    ends = [match.start() for match in re.finditer(re.escape(closing), text)]
    for start in starts:
        for end in ends:
            if start <= end:
                try:
                    yield start, end, json.loads(text[start:end])
                except (ValueError, RecursionError):
                    continue


def possible_calls(text):
    """(start, end, name, arguments) of everything in the text that could be a call."""
    for start, end, value in between(text, "<tool_call>", "</tool_call>"):
        if isinstance(value, dict) and "name" in value:
            arguments = value.get("arguments")
            try:
                arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            except (ValueError, RecursionError):
                continue
            if isinstance(arguments, dict):
                yield start, end, value["name"], arguments


def same(one, other):
    return json.dumps(one, sort_keys=True) == json.dumps(other, sort_keys=True)  # true is not 1


def check_assistant(text):
    parsed = parse_assistant(text)
    if parsed.error is not None:
        assert not parsed.calls and "\n" not in parsed.error and len(parsed.error) < 1000
        return 0
    possible, position = sorted(possible_calls(text), key=lambda entry: entry[:2]) if parsed.calls else [], 0
    for call in parsed.calls:  # each stands in the text, after the one before it
        found = next(
            (
                end
                for start, end, name, arguments in possible
                if start >= position and name == call.name and same(arguments, call.arguments)
            ),
            None,
        )
        assert found is not None, f"{call} is not in {text!r}"
        position = found
        json.dumps([call.name, call.arguments], ensure_ascii=False, allow_nan=False).encode()
    if text.startswith("<think>"):  # nothing in thoughts is a call
        assert len(parsed.calls) <= text.partition("</think>")[2].count("<tool_call>")
    return len(parsed.calls)


def check_rehearsal(text):
    result, ok = parse_rehearsal(text)
    value = json.loads(result)
    result.encode()
    assert isinstance(value, dict | list) and value != {} and "\n" not in result
    if not ok:
        assert "error_tool_call" in value
        return 0
    if text.lstrip().startswith("<think>"):
        text = text.partition("</think>")[2]
    assert any(same(value, found) for *_, found in between(text, "<execution_result>", "</execution_result>"))
    return 1


def check_verdicts(text, steps, items):
    try:
        verdicts = read_verdicts(text, steps, items)
    except ValueError as error:
        assert "\n" not in str(error) and len(str(error)) < 1000
        return 0
    rows = json.dumps([list(row) for row in verdicts], separators=(",", ":"))
    assert len(verdicts) == steps and all(len(row) == items for row in verdicts)
    assert rows in re.sub(r"\s", "", text) and '"verdicts"' in text
    return 1


def check_json(text):
    try:
        value = json_values.parse(text)
    except ValueError as error:
        assert "\n" not in str(error)
        return 0
    assert json.dumps(value) == json.dumps(json.loads(text))  # stricter than Python's, never another value
    try:
        json_values.check_writable(value)
    except ValueError:
        return 0
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return 1


def check_words(text, word):
    """By cutting the reply into its words and comparing them one by one."""
    held = says(text, [word])
    if held:
        assert word.casefold() in text.casefold() or word.lower() in text.lower()
    plain = [part.strip(".,") for part in text.split(" ")]
    if word in plain and "-" not in text and not re.search(rf"\d[.,]{word}|{word}[.,]\d", text):
        assert held
    return held


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.slow)])
def test_no_exception_and_nothing_invented(count):
    found = dict.fromkeys(("calls", "results", "verdicts", "values", "words"), 0)
    rng = random.Random(1)
    for text in texts(count, seed=0):
        found["calls"] += check_assistant(text)
        found["results"] += check_rehearsal(text)
        answer = text if rng.random() < 0.5 else piece(rng)
        found["verdicts"] += check_verdicts(answer, rng.randrange(1, 4), rng.choice((1, 2, 2, 2, 3)))
        found["values"] += check_json(answer)
        found["words"] += check_words(text, rng.choice(("120", "bob", "has", "12")))
    assert all(number > count / 200 for number in found.values()), found  # else nothing would have been tried


def test_what_known_pieces_hold_is_found_exactly():
    """Undamaged pieces in a row: the calls outside thoughts, all of them, in order, and nothing else."""
    rng = random.Random(2)
    for _ in range(500):
        text, calls = rng.choice(("", "<think>\nhm <tool_call>{}</tool_call>\n</think>\n")), []
        for _ in range(rng.randrange(6)):
            if rng.random() < 0.6:
                calls.append(json.loads(some_call(rng)))
                text += f"<tool_call>\n{json.dumps(calls[-1])}\n</tool_call>"
            else:
                text += rng.choice(("bob has 120.", "\n", "<think>x <tool_call></think>", "{} [1] <b>"))
        parsed = parse_assistant(text)
        assert parsed.error is None, (text, parsed.error)
        assert same([[call.name, call.arguments] for call in parsed.calls], [list(call.values()) for call in calls])


# --- time ---

SHAPES = {
    "opening tags": "<tool_call>",
    "closing tags": "</tool_call>",
    "results opened": "<execution_result>",
    "results closed": "</execution_result>",
    "tags in pairs": "<tool_call></tool_call>",
    "thoughts": "<think></think>",
    "thoughts closed": "</think>",
    "thoughts opened": "<think>",
    "thoughts and calls": '<think>a</think><tool_call>{"name": "a", "arguments": {}}</tool_call>',
    "calls": '<tool_call>{"name": "a", "arguments": {"b": 1}}</tool_call>',
    "brackets": "<",
    "braces": "{",
    "lists": "[",
    "objects": '{"a":',
    "quotes": '"',
    "backslashes": "\\",
    "escaped quotes": '\\"',
    "spaces": " ",
    "line breaks": "\n",
    "digits": "1",
    "digits and points": "1.",
    "digits and commas": "120,",
    "minus signs": "-",
    "letters": "a",
    "commas": ",",
    "numbers": "1,",
    "members twice": '"a": 1,',
    "escapes": "\\u0061",
    "surrogates": "\\ud800",
    "wide letters": "\U0001f327",
}
AROUND = (
    "{}", "<tool_call>{}", "<tool_call>{}</tool_call>", '<tool_call>{{"name": "a", "arguments": {{"b": {}',
    '<tool_call>{{"name": "a", "arguments": {{"b": "{}"}}}}</tool_call>', "<execution_result>{}</execution_result>",
    '<execution_result>{{"a": [{}1]}}</execution_result>', "<think>{}</think>x",
)  # fmt: skip
SIZE = 1_000_000  # characters
READERS = {
    "calls": parse_assistant,
    "results": parse_rehearsal,
    "json": lambda text: quietly(json_values.parse, text),
    "verdicts": lambda text: quietly(read_verdicts, text, 1, 1),
}
WORDS = {
    "number": lambda text: says(text, ["120"]),
    "word": lambda text: says(text, ["aaab"]),
    "odd word": lambda text: says(text, ["$1.5 -"]),
}  # texts are looked through as they are: what is around them does not matter
READERS |= WORDS
FLOOR_S = 0.004  # below it a time says more about the machine than about the reader
CEILING_S = 5.0


FAST = ("opening tags", "thoughts", "objects", "backslashes", "digits")  # of the shapes; the others are slow


def quietly(function, *arguments):
    try:
        function(*arguments)
    except ValueError:
        pass


def seconds(reader, text):
    start = time.process_time()
    reader(text)
    return time.process_time() - start


@pytest.mark.parametrize(
    "shape", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SHAPES]
)
def test_time_grows_with_the_length_alone(shape):
    """4 times the text may take 8 times the time, for the slowest of the surroundings; quadratic would be 16 times."""
    for name, reader in READERS.items():
        for around in AROUND[: 1 if name in WORDS else None]:
            whole, quarter = (around.format(SHAPES[shape] * (size // len(SHAPES[shape]))) for size in (SIZE, SIZE // 4))
            longest = seconds(reader, whole)
            assert longest < CEILING_S, (name, shape, around, longest)
            if longest > FLOOR_S:  # measured again only where there is something to measure
                longest = statistics.median([longest, seconds(reader, whole), seconds(reader, whole)])
                shorter = statistics.median(seconds(reader, quarter) for _ in range(3))
                assert longest < 8 * max(shorter, FLOOR_S / 2), (name, shape, around, longest, shorter)


@pytest.mark.parametrize("depth", [99, 150, 900, 100_000])
def test_a_result_that_later_readers_could_not_follow_is_an_error_of_the_policy(depth):
    """Comparing or pasting it would end in a RecursionError somewhere, which would mask the trajectory instead."""
    text = "<execution_result>" + '{"a":' * depth + "1" + "}" * depth + "</execution_result>"
    result, ok = parse_rehearsal(text)
    assert ok == (depth < 100) and (ok or "nested" in result)
