"""BFCL's simulators, entries and checkers in a worker process, as `worker_child.py` asks for them.

This file runs in whichever interpreter has the package bfcl-eval; of this package nothing is imported. BFCL executes
calls with `eval`. Here a call is written from parsed JSON, and in place of `eval` stands `execute`, which takes nothing
but a call of an instance's public method with literals as arguments.

An entry, as `ask` gives it and takes it back, is BFCL's with `function` (documents of all its functions), `missed`
(turn -> documents of functions that are held back until then) and `ground_truth`.

    ask({"do": "entries", "source": CATEGORY or PATH})     the entries
    ask({"do": "gold", "entry": ...})                      [[name, arguments, result], ...] for each turn
    ask({"do": "score", "entry": ..., "turns": [[[[name, arguments], ...] for each step] for each turn]})
    ask({"do": "memory", "entry": ..., "turns": ...})      what a memory holds after these calls: `state`, `text`

In memory_kv a conversation goes on with the memory that the one before it left. BFCL hands it on in files; here it is
`memory` in the initial configuration of the entry's one simulator.
"""

import ast
import importlib.metadata
import itertools
import json
import keyword
import math
import re
import sys
import types
from pathlib import Path

PACKAGE, VERSION = "bfcl-eval", "2026.3.23"
INSTALL = f"pip install --no-deps {PACKAGE}=={VERSION} mpmath==1.3.0 filelock"
MEMORY_INSTALL = "pip install rank_bm25 overrides"
# The others of BFCL need the internet or a model from a hub.
CLASSES = (
    "GorillaFileSystem", "MathAPI", "MessageAPI", "TwitterAPI", "TicketAPI", "TradingBot", "TravelAPI",
    "VehicleControlAPI", "MemoryAPI_kv",
)  # fmt: skip
SINGLE_TURN = (
    "simple_python", "multiple", "parallel", "parallel_multiple", "irrelevance", "live_simple", "live_multiple",
    "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
)  # fmt: skip
MULTI_TURN = ("multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context")
MEMORY, MEMORY_BEFORE = "memory_kv", "memory_kv_prereq"  # questions, and the conversations that are to be remembered
EXECUTED = (*MULTI_TURN, MEMORY, MEMORY_BEFORE)
UNANSWERED = ("irrelevance", "live_irrelevance", "live_relevance")  # it only counts whether there is a call
MOST_STEPS = 20  # assistant messages with calls in a turn; more fail the entry
LARGEST_BITS = 1024  # of an integer argument
NAME = "envace_jax"  # of the model, to BFCL's checkers: dots in names become underscores

runs = itertools.count()


def new_run():
    """A name that no other simulators have; all are equally long, since BFCL writes them into texts (`run_calls`)."""
    return f"run{next(runs):09d}"


class OutOfMemory(BaseException):
    """A MemoryError on its way through BFCL's executor, which would make a result of it."""


class Episode:
    """An entry's simulators, which BFCL keeps in its module under names that begin with `run`."""

    def __init__(self, entry):
        self.entry, self.run = entry, new_run()
        self.names = names_of(entry)
        self.instances = {}


# --- what the worker's loop calls ---


def setup():
    """Imports the package. Raises RuntimeError, one line for people, where it is missing or of another version."""
    try:
        found = importlib.metadata.version(PACKAGE)
        if found != VERSION:
            raise RuntimeError(f"{sys.executable} has {PACKAGE} {found}, and {VERSION} is needed: {INSTALL}")
        # The table of all models imports every vendor's package; the checker asks it for one thing.
        models = types.ModuleType("bfcl_eval.constants.model_config")
        models.MODEL_CONFIG_MAPPING = {NAME.replace("_", "/"): types.SimpleNamespace(underscore_to_dot=True)}
        sys.modules[models.__name__] = models
        import bfcl_eval.eval_checker.ast_eval.ast_checker
        import bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker
        import bfcl_eval.utils  # noqa: F401, this and the next are looked for now rather than when they are used
        import mpmath  # noqa: F401
    except ImportError as error:  # PackageNotFoundError is one
        missing = getattr(error, "name", None) or PACKAGE
        raise RuntimeError(f"{sys.executable} lacks {missing} for the BFCL environments: {INSTALL}") from None
    executor().eval = execute  # found before the builtin
    return {"package": PACKAGE, "version": found}


def open_episode(spec):
    check_entry(spec)
    if category_of(spec) in (MEMORY, MEMORY_BEFORE):
        check_memory()
    episode = Episode(spec)
    if spec["involved_classes"]:
        run_calls(episode, [])
    return episode


def call(episode, name, arguments):
    """The result of a call as a JSON object or list. What is not listed or cannot be written is not executed."""
    refusal = refused(episode.names, name, arguments)
    if refusal is not None:
        return refusal
    if not episode.entry["involved_classes"]:  # its functions have no simulator
        return {"result": "the call was received; this function is not executed"}
    (text,) = run_calls(episode, [written(episode.names[name], arguments)])
    return as_result(text)


def state(episode):
    """The public attributes of every simulator; what is not JSON as its text."""
    return {
        name: {key: plain(value) for key, value in vars(instance).items() if not key.startswith("_")}
        for name, instance in episode.instances.items()
    }


def close_episode(episode):
    forget(episode.run)


def ask(request):
    if request["do"] == "entries":
        return entries_of(request["source"])
    check_entry(request["entry"])
    return {"gold": gold, "score": score, "memory": memory}[request["do"]](request)


# --- executing calls ---


def executor():
    return sys.modules["bfcl_eval.eval_checker.multi_turn_eval.multi_turn_utils"]


def run_calls(episode, texts):
    """BFCL's results of calls, in order, as texts.

    BFCL takes a name before a bracket for a function even inside an argument's text, and writes its instance's name
    there. The number in it depends on what was executed before, which no result may say: attempts would not repeat.
    """
    entry = episode.entry
    try:
        results, episode.instances = executor().execute_multi_turn_func_call(
            texts, entry["initial_config"], entry["involved_classes"], episode.run, entry["id"],
            long_context="long_context" in category_of(entry) or "composite" in category_of(entry), is_evaL_run=False,
        )  # fmt: skip
    except OutOfMemory:
        raise MemoryError from None
    return [result.replace(f"{episode.run}_", "run_") if isinstance(result, str) else result for result in results]


def execute(text):
    """In place of `eval` of `INSTANCE.method(literal, name=literal)`; whatever else is written there is refused."""
    try:
        tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.Call):
            raise SyntaxError("not a call")
        positional = [ast.literal_eval(value) for value in tree.args]
        named = {pair.arg: ast.literal_eval(pair.value) for pair in tree.keywords}
        return method_of(tree.func)(*positional, **named)
    except MemoryError:
        raise OutOfMemory from None


def method_of(function):
    """The public method of a simulator that a call's first part names."""
    if isinstance(function, ast.Name):  # what is no method of a simulator stays without an instance's name
        raise NameError(f"name {function.id!r} is not defined")
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        raise NameError("not the name of a function")
    instance = vars(executor()).get(function.value.id)
    if type(instance).__name__ not in CLASSES or function.attr.startswith("_"):
        raise NameError(f"{function.attr!r} is not a function of a simulator")
    return getattr(instance, function.attr)


def forget(run):
    """Takes the simulators of a run, which BFCL never does, out of its module."""
    for name in [name for name in vars(executor()) if name.startswith(f"{run}_")]:
        del vars(executor())[name]


def refused(names, name, arguments):
    """Why a call is not executed, as a result, or None."""
    if name not in names:
        return error_result("unknown_tool", f"no tool is called {name}", sorted(names))
    problems = sorted(filter(None, (problem_of(key, value) for key, value in arguments.items())))
    return error_result("invalid_arguments", f"the arguments do not fit {name}", problems) if problems else None


def problem_of(key, value):
    """What keeps an argument from being written into a call, or None."""
    if not key.isidentifier() or keyword.iskeyword(key) or not key.isascii():
        return f"{ascii(key)} is not the name of an argument"
    unseen = [value]
    while unseen:
        current = unseen.pop()
        if isinstance(current, float) and not math.isfinite(current):
            return f"{key}: {current} is not a JSON number"
        if isinstance(current, int) and current.bit_length() > LARGEST_BITS:
            return f"{key}: an integer of more than {LARGEST_BITS} bits"
        if isinstance(current, dict):
            unseen += [*current, *current.values()]
        elif isinstance(current, list):
            unseen += current
    return None


def written(name, arguments):
    """A call as BFCL takes it."""
    return f"{name}({','.join(f'{key}={value!r}' for key, value in arguments.items())})"


def error_result(code, message, details):
    return {"error_tool_call": {"code": code, "message": message, "details": details}}


def as_result(text):
    """A JSON object or list of what BFCL gives, which is such a text or any other."""
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, (dict, list)):
        return value
    failed = isinstance(value, str) and value.startswith("Error during execution: ")
    return {"error" if failed else "result": value}


def plain(value):
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return str(value)


# --- entries ---


def entries_of(source):
    """The entries of a category of the package or of a file of the same form. Raises RuntimeError, one line."""
    import bfcl_eval.utils as utils

    if source in SINGLE_TURN + MULTI_TURN + (MEMORY,):
        entries = utils.load_dataset_entry(source)
        answers = None if source in UNANSWERED else utils.load_ground_truth_entry(source)
        if source == MEMORY:
            check_memory()
            answers = [{**answer, "id": answer["id"].replace("memory", MEMORY, 1)} for answer in answers]
    elif Path(source).is_file():
        entries = lines_of(Path(source))
        for entry in entries:
            check_raw(entry, source)
        utils.populate_test_cases_with_predefined_functions(entries)
        utils.add_language_specific_hint_to_function_doc(entries)
        path = Path(source).parent / "possible_answer" / Path(source).name
        answers = lines_of(path) if path.is_file() else None
    else:
        there = ", ".join(SINGLE_TURN + MULTI_TURN + (MEMORY,))
        raise RuntimeError(f"BFCL has no category or file {source}; categories are {there}")
    known = {answer["id"]: answer["ground_truth"] for answer in answers or ()}
    for entry in entries:
        if entry["id"] not in known and category_of(entry) not in (*UNANSWERED, MEMORY_BEFORE):
            raise RuntimeError(
                f"{source}: {entry['id']} has no answer (possible_answer/FILE of the same name beside it)"
            )
        entry["ground_truth"] = known.get(entry["id"])
        entry["missed"] = entry.get("missed_function", {})
        entry.setdefault("involved_classes", [])
        entry.setdefault("initial_config", {})
    return entries


def lines_of(path):
    """The records of a file of JSON lines."""
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            if line.strip():
                records.append(json.loads(line))
                records[-1]["id"] + ""
        except (ValueError, TypeError, KeyError) as error:
            raise RuntimeError(f"{path}, line {number}: no JSON object with a text as id ({error!r})") from None
    return records


def check_raw(entry, source):
    """Raises RuntimeError for an entry of a user's file that lacks what BFCL's functions look for."""
    check_entry(entry)
    many = category_of(entry) in EXECUTED
    wanted = {"question": list} | ({"involved_classes": list, "initial_config": dict} if many else {"function": list})
    for name, kind in wanted.items():
        if not isinstance(entry.get(name), kind):
            raise RuntimeError(f"{source}: {entry['id']} has no {name}, or it is no {kind.__name__}")
    try:
        for turn in entry["question"]:
            for message in turn:
                message["role"] + message["content"]
        for document in entry.get("function", ()):
            document["name"] + document["description"]
            dict(document["parameters"]["properties"])
    except (TypeError, KeyError, ValueError) as error:
        raise RuntimeError(f"{source}: {entry['id']}: not as BFCL writes messages or functions ({error!r})") from None


def check_entry(entry):
    """Raises RuntimeError for an entry of another kind, or whose names could not be part of BFCL's code."""
    if not re.fullmatch(r"[\w.-]{1,200}", entry["id"], re.ASCII):
        raise RuntimeError(f"{ascii(entry['id'])} cannot be an entry's id: letters, digits, _ . and - are accepted")
    if category_of(entry) not in SINGLE_TURN + EXECUTED:
        there = ", ".join(SINGLE_TURN + MULTI_TURN + (MEMORY,))
        raise RuntimeError(f"{entry['id']} is of no category that can be used here; there are {there}")
    for name in entry.get("involved_classes", ()):
        if name not in CLASSES:
            raise RuntimeError(f"{entry['id']}: {ascii(name)} is no simulator; there are {', '.join(CLASSES)}")


def category_of(entry):
    """BFCL's category, the part of the id before its number."""
    return entry["id"].rsplit("_", 1)[0]


def names_of(entry):
    """The names under which an entry's functions are called -> BFCL's own; functions held back are among them."""
    documents = itertools.chain(entry["function"], *entry["missed"].values())
    return {document["name"].replace(".", "_"): document["name"] for document in documents}


# --- memories ---


def check_memory():
    """Lets memories come with the entry rather than from files. Raises RuntimeError where a package is missing."""
    try:
        import bfcl_eval.eval_checker.multi_turn_eval.func_source_code.memory_kv  # noqa: F401
        from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.memory_api_metaclass import MemoryAPI
    except ImportError as error:
        raise RuntimeError(f"{sys.executable} lacks {error.name} for BFCL's {MEMORY}: {MEMORY_INSTALL}") from None
    MemoryAPI._prepare_snapshot = lambda self, initial_config: initial_config.get("memory")


def memory(request):
    """{"state": what the entry's memory holds after the calls, to begin another with, "text": the part of it that
    BFCL shows in the next conversation's system message, with what it says of memories}."""
    from bfcl_eval.constants import default_prompts

    entry, (name,) = request["entry"], request["entry"]["involved_classes"]
    episode = open_episode(entry)
    try:
        for turn in sound_calls(episode.names, request["turns"]):
            for step in turn:
                run_calls(episode, [written(episode.names[called], given) for called, given in step])
        instance = episode.instances[name]
        text = default_prompts.MEMORY_BACKEND_INSTRUCTION_CORE_ARCHIVAL.format(
            scenario_setting=default_prompts.MEMORY_AGENT_SETTINGS[entry["scenario"]],
            memory_content=instance._dump_core_memory_to_context(),
        )
        state = {key: plain(getattr(instance, key)) for key in ("core_memory", "archival_memory")}
        return {"state": state, "text": text}
    finally:
        close_episode(episode)


# --- gold calls and verdicts ---


def gold(request):
    """The gold calls with their arguments' names, and what they give, turn by turn."""
    episode = open_episode(request["entry"])
    try:
        turns = []
        for texts in request["entry"]["ground_truth"]:
            results = run_calls(episode, texts)
            turns.append(
                [[*parsed(episode, text), as_result(given)] for text, given in zip(texts, results, strict=True)]
            )
        return turns
    finally:
        close_episode(episode)


def parsed(episode, text):
    """Name and arguments of a gold call. Raises RuntimeError where it is none of a listed function."""
    tree = ast.parse(text.strip(), mode="eval").body
    name = getattr(getattr(tree, "func", None), "id", None)
    if name not in episode.names.values():
        raise RuntimeError(f"{episode.entry['id']}: the gold call {text} is of no function of the entry")
    documents = itertools.chain(episode.entry["function"], *episode.entry["missed"].values())
    order = next(document["parameters"]["properties"] for document in documents if document["name"] == name)
    arguments = dict(zip(order, map(ast.literal_eval, tree.args), strict=False))  # named ones may follow
    return name, arguments | {pair.arg: ast.literal_eval(pair.value) for pair in tree.keywords}


def score(request):
    """BFCL's verdict: {"valid", "error_type"}."""
    entry, turns = request["entry"], request["turns"]
    names = names_of(entry)
    if not entry["involved_classes"]:
        return single_turn_score(entry, turns[0][0] if turns and turns[0] else [])
    if category_of(entry) == MEMORY:
        from bfcl_eval.eval_checker.agentic_eval.agentic_checker import agentic_checker

        verdict = agentic_checker(request["reply"], entry["ground_truth"])
        return {"valid": bool(verdict["valid"]), "error_type": verdict.get("error_type", "")}
    sound = sound_calls(names, turns)
    if len(turns) != len(entry["ground_truth"]) or max(map(len, sound), default=0) > MOST_STEPS:
        return {"valid": False, "error_type": "multi_turn:force_terminated"}
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

    decoded = [[[written(names[name], given) for name, given in step] for step in turn if step] for turn in sound]
    run = new_run()
    try:
        verdict = multi_turn_checker(decoded, entry["ground_truth"], entry, category_of(entry), run)
    except OutOfMemory:
        raise MemoryError from None
    finally:
        forget(run)
    return {"valid": bool(verdict["valid"]), "error_type": verdict.get("error_type", "")}


def sound_calls(names, turns):
    """[turn][step][call] without the calls that were refused, and so never executed."""
    return [[[pair for pair in step if refused(names, *pair) is None] for step in turn if step] for turn in turns]


def single_turn_score(entry, calls):
    """The verdict on the first message's calls alone, as BFCL asks for one. A call of an unlisted function is one."""
    category = category_of(entry)
    if category in UNANSWERED:
        return {"valid": bool(calls) != ("irrelevance" in category), "error_type": ""}
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker

    given = [{name: arguments} for name, arguments in calls]
    verdict = ast_checker(entry["function"], given, entry["ground_truth"], Language.PYTHON, category, NAME)
    return {"valid": bool(verdict["valid"]), "error_type": verdict.get("error_type", "")}
