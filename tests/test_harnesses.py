"""Others' programs, unmodified, against the server: the harnesses BFCL and tau2, the clients litellm and schemathesis.

Each runs in an interpreter of its own, since they pin other versions than ours: ENVACE_BFCL_PYTHON and
ENVACE_TAU2_PYTHON name them, and what they lack is left out (docs/environments.md says what to install). Where right
answers are to be seen, they are written in advance, and everything but the model is what a user runs; the tiny model
then shows that whatever a model writes comes to an end.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import textwrap
import urllib.request
from pathlib import Path

import pytest
import serving

from envace_jax.config import ASSETS
from envace_jax.envs import load_domain
from envace_jax.roles import render_call
from envace_jax.types import ToolCall

pytestmark = pytest.mark.slow
WAIT = 400  # seconds
LONG = 8192  # tokens of tau2's longest prompt and an answer fit
DONE = "Done."
SCRIPTED = "scripted"  # the model's name


def interpreter(variable: str, *modules: str):
    """(its path, the mark that leaves a test out where it is not there or lacks a module)"""
    python = os.environ.get(variable, "")
    check = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, {modules!r})))"
    there = bool(python) and subprocess.run([python, "-c", check], stderr=subprocess.DEVNULL).returncode == 0
    reason = f"{variable} names no interpreter with {', '.join(modules)}: docs/environments.md"
    return python, pytest.mark.skipif(not there, reason=reason)


BFCL, needs_bfcl = interpreter("ENVACE_BFCL_PYTHON", "bfcl_eval", "openai", "overrides", "tenacity", "tree_sitter")
TAU2, needs_tau2 = interpreter("ENVACE_TAU2_PYTHON", "tau2", "litellm", "tenacity", "fastapi", "gymnasium")
LITELLM, needs_litellm = interpreter("ENVACE_TAU2_PYTHON", "litellm")
SCHEMATHESIS, needs_schemathesis = interpreter("ENVACE_TAU2_PYTHON", "schemathesis")


def run(command, folder: Path, url: str = "", **environment: str) -> str:
    """What a program prints, run in a folder of its own."""
    variables = {
        **os.environ, "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "BFCL_PROJECT_ROOT": str(folder), "COLUMNS": "200", **environment,
    }  # fmt: skip
    variables.pop("PYTHONPATH", None)  # theirs is not ours
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=WAIT)
    assert done.returncode == 0, (
        f"{command[:3]} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-5000:]}"
    )
    return done.stdout


def python(executable: str, code: str, folder: Path, url: str, *arguments: str):
    """The JSON that a piece of code prints in its last line."""
    command = [executable, "-c", textwrap.dedent(code), *arguments]
    return json.loads(run(command, folder, url).strip().splitlines()[-1])


def calling(*calls: tuple[str, dict]) -> str:
    return "\n".join(f"<tool_call>\n{render_call(ToolCall(*call))}\n</tool_call>" for call in calls)


def last_user(prompt: str) -> str:
    """The text of a prompt's last user message, tool results among them."""
    return prompt.rsplit("<|im_start|>user\n", 1)[-1].split("<|im_end|>")[0]


@contextlib.contextmanager
def scripted(answer):
    """The address of a server whose model, called "scripted", answers a prompt's text as `answer` does."""
    with serving.scripted_model(lambda prompt, _: answer(prompt), slots=16, max_length=500_000, chunk=50) as model:
        with serving.serving(model) as url:
            yield url
        assert model.engine.faults == model.engine.running == model.engine.waiting == 0


@pytest.fixture(scope="module")
def tiny():
    with serving.server() as url:
        yield url


# --- BFCL ---

BFCL_GOLD = """
    # The user's texts and right calls of a few entries: {text: [[name, arguments], ...]}.
    import ast, json, sys
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry
    from bfcl_eval.constants.executable_backend_config import MULTI_TURN_FUNC_DOC_FILE_MAPPING

    def parsed(text, functions):
        call = ast.parse(text, mode="eval").body
        names = next(list(f["parameters"]["properties"]) for f in functions if f["name"].endswith(call.func.id))
        given = dict(zip(names, call.args)) | {k.arg: k.value for k in call.keywords}
        return [call.func.id, {name: ast.literal_eval(value) for name, value in given.items()}]

    gold = {}
    for category, count in json.loads(sys.argv[1]).items():
        entries = load_dataset_entry(category)[:count]
        answers = {answer["id"]: answer["ground_truth"] for answer in load_ground_truth_entry(category)}
        for entry in entries:
            for turn, messages in enumerate(entry["question"]):
                text = messages[-1]["content"]
                if "multi_turn" in category:
                    gold[text] = [parsed(call, entry["function"]) for call in answers[entry["id"]][turn]]
                else:
                    for call in answers[entry["id"]]:
                        for name, arguments in call.items():
                            given = {key: values[0] for key, values in arguments.items() if values[0] != ""}
                            gold.setdefault(text, []).append([name.replace(".", "_"), given])
    print(json.dumps(gold))
"""
BFCL_PLAY = """
    # The unmodified handler plays the same entries; BFCL's own checkers say what is right. Its module of models imports
    # the handlers of all vendors; where their packages are not installed, names without meaning stand in for them.
    import importlib.abc, importlib.util, json, sys, types

    VENDORS = {
        "anthropic", "boto3", "cohere", "datamodel_code_generator", "google", "httpx", "mistralai", "qwen_agent",
        "requests", "writerai",
    }

    def stand_in(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (Exception,), {})

    class Anything(type):
        def __getattr__(cls, name):
            return stand_in(name)

    class Vendors(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path=None, target=None):
            found = name.partition(".")[0] in VENDORS
            return importlib.util.spec_from_loader(name, self, is_package=True) if found else None

        def create_module(self, spec):
            module = types.ModuleType(spec.name)
            module.__getattr__ = stand_in
            return module

        def exec_module(self, module):
            pass

    sys.meta_path.append(Vendors())  # the last: what is installed is used
    from bfcl_eval.constants.enums import Language
    from bfcl_eval.eval_checker.ast_eval.ast_checker import ast_checker
    from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler
    from bfcl_eval.utils import load_dataset_entry, load_ground_truth_entry

    handler = OpenAICompletionsHandler(
        model_name=sys.argv[2], temperature=0.001, registry_name="served-FC", is_fc_model=True
    )
    found = {}
    for category, count in json.loads(sys.argv[1]).items():
        answers = {answer["id"]: answer["ground_truth"] for answer in load_ground_truth_entry(category)}
        for entry in load_dataset_entry(category)[:count]:
            result, metadata = handler.inference(dict(entry), False, True)
            tokens = metadata["input_token_count"]
            while isinstance(tokens, list):
                tokens = tokens[0]
            try:
                if "multi_turn" in category:
                    steps = [[handler.decode_execute(step, False) for step in turn if isinstance(step, list)]
                             for turn in result]
                    gold = answers[entry["id"]]
                    valid = multi_turn_checker(steps, gold, entry, category, "served-FC")["valid"]
                else:
                    decoded = handler.decode_ast(result, "Python", False)
                    name = "gpt-4o-2024-11-20-FC"  # one whose dots in names become underscores, as here
                    gold = answers[entry["id"]]
                    valid = ast_checker(entry["function"], decoded, gold, Language.PYTHON, category, name)["valid"]
            except Exception as error:
                valid = f"{type(error).__name__}: {error}"
            found[entry["id"]] = [valid, tokens]
    print(json.dumps(found))
"""


@needs_bfcl
def test_bfcl_scores_right_calls_as_right(tmp_path):
    """Single calls, calls side by side, and a whole conversation of several turns in its Python simulators."""
    wanted = json.dumps({"simple_python": 4, "parallel": 2, "multi_turn_base": 1})
    gold = python(BFCL, BFCL_GOLD, tmp_path, "", wanted)

    def script(prompt: str) -> str:
        asked = last_user(prompt)
        return DONE if asked.startswith("<tool_response>") else calling(*gold[asked])

    with scripted(script) as url:
        found = python(BFCL, BFCL_PLAY, tmp_path, url, wanted, SCRIPTED)
    assert len(found) == 7 and all(valid is True and tokens > 50 for valid, tokens in found.values()), found
    with scripted(lambda prompt: calling(("no_such_tool", {"a": 1}))) as url:
        found = python(BFCL, BFCL_PLAY, tmp_path, url, json.dumps({"simple_python": 2}), SCRIPTED)
    assert [valid for valid, _ in found.values()] == [False, False]


@needs_bfcl
def test_bfcl_runs_to_the_end_whatever_the_model_writes(tiny, tmp_path):
    wanted = json.dumps({"simple_python": 2})
    found = python(BFCL, BFCL_PLAY, tmp_path, tiny, wanted, serving.NAME)
    assert len(found) == 2 and all(tokens > 50 for _, tokens in found.values())


# --- tau2 ---


def tau2_run(url: str, name: str, folder: Path, *options: str):
    """The simulations of `tau2 run` on mock tasks, played solo."""
    arguments = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "max_tokens": 100}
    command = [
        str(Path(TAU2).parent / "tau2"), "run", "--domain", "mock", "--agent", "llm_agent_solo", "--user", "dummy_user",
        "--agent-llm", f"openai/{name}", "--agent-llm-args", json.dumps(arguments), "--max-steps", "10",
        "--max-concurrency", "2", "--max-retries", "0", "--save-to", "played", "--results-dir", str(folder),
        "--log-level", "ERROR", *options,
    ]  # fmt: skip
    run(command, folder, url)
    return json.loads((folder / "played.json").read_text())["simulations"]


def counted(url: str, name: str) -> float:
    """A figure of the server's, 0 before there is any."""
    lines = urllib.request.urlopen(f"{url}/metrics").read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


@needs_tau2
def test_tau2_rewards_right_calls(tmp_path):
    tickets = {
        "'Important Meeting'": ("create_task", {"user_id": "user_1", "title": "Important Meeting"}),
        "status of task_1 to completed": ("update_task_status", {"task_id": "task_1", "status": "completed"}),
    }

    def script(prompt: str) -> str:
        call = ("done", {})
        if "<tool_response>" not in prompt:
            (call,) = [right for ticket, right in tickets.items() if ticket in prompt]
        # The server has begun the call already, since tau2 says that one is required.
        begun = prompt.rsplit("<|im_start|>assistant\n", 1)[1].split("</think>\n\n")[-1]
        assert begun.startswith("<tool_call>\n") and calling(call).startswith(begun)
        return calling(call).removeprefix(begun)

    with scripted(script) as url:
        played = tau2_run(url, SCRIPTED, tmp_path, "--task-ids", "create_task_1", "update_task_1")
    rewards = {simulation["task_id"]: simulation["reward_info"]["reward"] for simulation in played}
    assert rewards == {"create_task_1": 1.0, "update_task_1": 1.0}
    assert {simulation["termination_reason"] for simulation in played} == {"agent_stop"}


@needs_tau2
def test_tau2_runs_to_the_end_whatever_the_model_writes(tmp_path):
    """The tiny model speaks where tau2 wants calls alone, which ends its simulations and not the run.

    It is told that it knows more positions than it was taught, since tau2's prompts are longer.
    """
    folder = shutil.copytree(ASSETS / "tiny_base", tmp_path / serving.NAME)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONG}))
    with serving.server(path=str(folder), max_length=LONG, cache_lengths=(LONG,)) as url:
        tau2_run(url, serving.NAME, tmp_path, "--num-tasks", "2", "--skip-failed-samples")
        asked = 'envace_requests_total{method="POST",route="/v1/chat/completions"'
        answered = counted(url, f'{asked},status="200"')
        assert answered == counted(url, asked) >= 2  # for both tasks; the results' file was read above
        assert counted(url, 'envace_tokens_total{kind="completion"}') > 0


# --- litellm ---

LITELLM_PLAY = """
    import asyncio, json, sys
    import litellm

    url, name, tools = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    server = dict(model=f"openai/{name}", api_base=f"{url}/v1", api_key="none", num_retries=0)
    common = dict(server, temperature=0, tools=tools)
    price = [{"role": "user", "content": "how much does the lamp cost here ?"}]
    first = litellm.completion(**common, messages=price)
    message = first.choices[0].message
    (call,) = message.tool_calls
    told = [*price, message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": '{"price": 35}'}]
    chunks = list(litellm.completion(**common, messages=told, stream=True, stream_options={"include_usage": True}))
    built = litellm.stream_chunk_builder(chunks, messages=told)
    other = asyncio.run(litellm.acompletion(**common, messages=told))
    found = {
        "call": [call.function.name, json.loads(call.function.arguments)], "finish": first.choices[0].finish_reason,
        "streamed": built.choices[0].message.content, "usage": built.usage.total_tokens,
        "whole": other.choices[0].message.content, "whole_usage": other.usage.total_tokens,
    }
    for name, changed in {
        "BadRequestError": {"temperature": 9}, "NotFoundError": {"model": "openai/other"},
        "ContextWindowExceededError": {"messages": [{"role": "user", "content": "lamp " * 5000}]},
    }.items():
        try:
            litellm.completion(**{**common, "messages": price, **changed})
            found[name] = "nothing"
        except Exception as error:
            found[name] = type(error).__name__
    print(json.dumps(found))
"""


@needs_litellm
def test_litellm(tiny, tmp_path):
    tools = json.dumps(list(load_domain("shop").TOOLS))
    found = python(LITELLM, LITELLM_PLAY, tmp_path, tiny, tiny, serving.NAME, tools)
    assert found["call"] == ["price", {"item": "lamp"}] and found["finish"] == "tool_calls"
    assert found["streamed"] == found["whole"] == "the lamp costs 35."
    assert found["usage"] == found["whole_usage"] > 60
    for name in ("BadRequestError", "NotFoundError", "ContextWindowExceededError"):
        assert found[name] == name


# --- schemathesis ---


@needs_schemathesis
def test_schemathesis_finds_nothing(tmp_path):
    """Requests made from the server's own description, right ones and wrong ones.

    All checks are on; most of these name a model that is not there. Then all name the right one, and what is wrong is
    only known where fields are seen together, which no schema says: right by the schema is then not always accepted.
    """
    command = [
        str(Path(SCHEMATHESIS).parent / "schemathesis"),
        "run",
        "--max-examples",
        "60",
        "--seed",
        "1",
        "--no-color",
        "--warnings",  # that many models are not there
        "off",
    ]
    with scripted(lambda prompt: DONE) as url:
        assert "No issues found" in run([*command, f"{url}/openapi.json"], tmp_path)
        document = json.loads(urllib.request.urlopen(f"{url}/openapi.json").read())
        for kind in ("ChatRequest", "RehearsalRequest"):
            document["components"]["schemas"][kind]["properties"]["model"] = {"const": SCRIPTED}
        (tmp_path / "named.json").write_text(json.dumps(document))
        deeper = ["named.json", "--url", url, "--exclude-checks", "positive_data_acceptance"]
        assert "No issues found" in run([*command, *deeper], tmp_path)
