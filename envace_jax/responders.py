"""Who answers a tool call: the policy itself (`Rehearsed`) or an executable environment (`Real`).

A responder gives futures, so that a slow one holds up only the trajectories that wait for it. It knows nothing of
rewards. The third one, another model that gets the policy's REHEARSE prompts, is in `external.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Protocol

from envace_jax.envs import Environment, load_process
from envace_jax.futures import then
from envace_jax.types import Json, MessageList, Need, Task, ToolCall


class Responder(Protocol):
    """`needs` says what an episode with open calls waits for: REHEARSE (the policy plays the tools) or RESPONSE.

    `prompted` says whether an answer from outside is asked for by a REHEARSE prompt, which then has to fit.
    """

    needs: Need
    prompted: bool

    def respond(
        self, trajectory_index: int, task: Task, call: ToolCall, messages: MessageList, act_text: str = ""
    ) -> Future[str]:
        """The JSON text of the call's result, an object or an array; anything else, or an exception, is a fault.

        Called once per call, in call order; `messages` is the conversation up to and including the calling message, and
        `act_text` that message as it was generated. Raises roles.PromptTooLong where the prompt does not fit.
        """

    def end(self, trajectory_index: int, task: Task) -> None:
        """The trajectory is over: nothing more will be asked for it."""

    def close(self) -> None:
        """Lets go of all that it holds."""


class Rehearsed:
    """The policy answers its own calls, in its REHEARSE role; nothing outside is ever asked."""

    needs = Need.REHEARSE
    prompted = False  # nothing outside is asked

    def respond(
        self, trajectory_index: int, task: Task, call: ToolCall, messages: MessageList, act_text: str = ""
    ) -> Future[str]:
        raise RuntimeError(f"call {call.name!r} of task {task.task_id!r} was to be rehearsed, not answered outside")

    def end(self, trajectory_index: int, task: Task) -> None:
        pass

    def close(self) -> None:
        pass


class Real:
    """Executes calls in one environment per trajectory, opened at its first call and closed when it ends.

    An environment answers at once or with a future, and executes the calls of its trajectory in order either way, so
    results do not depend on timing. `calls` counts calls given to environments. Final states of environments that run
    in this process stay until `close()`, under the trajectory's index in its rollout; a second rollout without
    `close()` overwrites them. Process modules judge conversations instead (`envs`), and no state of theirs is kept.
    """

    needs = Need.RESPONSE
    prompted = False

    def __init__(self, make_environment: Callable[[Mapping[str, Json]], Environment]) -> None:
        self.calls = 0
        self._make_environment = make_environment
        self._open: dict[int, Environment] = {}
        self._final_states: dict[int, Json] = {}

    def respond(
        self, trajectory_index: int, task: Task, call: ToolCall, messages: MessageList, act_text: str = ""
    ) -> Future[str]:
        answer: Future[str] = Future()
        try:
            environment = self._environment(trajectory_index, task)
            self.calls += 1
            result = environment.call(call.name, call.arguments)
            if isinstance(result, Future):
                return then(result, _written)
            answer.set_result(_written(result))
        except Exception as error:  # whatever an environment raises is a fault of this trajectory alone
            answer.set_exception(error)
        return answer

    def end(self, trajectory_index: int, task: Task) -> None:
        """Keeps the final state (the initial one where nothing was called) and lets the environment go."""
        try:
            if task.environment is not None and load_process(task.environment["name"]) is None:
                self._final_states[trajectory_index] = self._environment(trajectory_index, task).state()
        finally:
            environment = self._open.pop(trajectory_index, None)
            if environment is not None:
                environment.close()

    def final_state(self, trajectory_index: int) -> Json:
        """The environment's state at the end of that trajectory. Raises KeyError where it has not ended."""
        if trajectory_index not in self._final_states:
            raise KeyError(f"trajectory {trajectory_index} has no final state: it has not ended, or Real was closed")
        return self._final_states[trajectory_index]

    def close(self) -> None:
        """Lets go of all environments and final states; the count of calls stays."""
        for environment in self._open.values():
            environment.close()
        self._open.clear()
        self._final_states.clear()

    def _environment(self, trajectory_index: int, task: Task) -> Environment:
        if task.environment is None:
            raise ValueError(f"task {task.task_id!r} has no environment to execute calls in")
        if trajectory_index not in self._open:
            self._open[trajectory_index] = self._make_environment(task.environment)
        return self._open[trajectory_index]


def _written(result: Json) -> str:
    return json.dumps(result, ensure_ascii=False, allow_nan=False)
