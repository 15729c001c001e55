"""docs/rewards.md: every command is one that the programs take, and every name in it is one that exists."""

from __future__ import annotations

import re
import shlex

import judge_agreement
import pytest
from conftest import REPOSITORY

from envace_jax import config as configuration
from envace_jax import main
from envace_jax.config import RunConfig, to_json
from envace_jax.episode import Reason

TEXT = (REPOSITORY / "docs" / "rewards.md").read_text()
COMMANDS = [
    shlex.split(command)
    for block in re.findall(r"```bash\n(.*?)```", TEXT, re.DOTALL)
    for command in block.replace("\\\n", " ").strip().splitlines()
]


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_the_commands_are_taken(command, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    if command[:3] == ["python", "-m", "envace_jax.main"]:
        config, _ = main.read_flags(command[2:])  # which also says what cannot work together
        assert (config.reward.kind, config.rollout.responder) in (("judge", "rehearsed"), ("checklist", "external"))
        given = [argument.split("=")[0].removeprefix("--config.") for argument in command if "--config." in argument]
        assert {"reward.kind", "rollout.responder"} & set(given)
    else:
        assert command[:2] == ["python", "experiments/judge_agreement.py"]
        args = judge_agreement.make_parser().parse_args(command[2:])
        assert bool(args.url and args.model) != bool(args.checkpoint)


def test_there_are_commands_for_all_three_judges_and_the_simulator():
    text = "\n".join(" ".join(command) for command in COMMANDS)
    for part in ("reward.urls=", "reward.checkpoint=policy", "reward.checkpoint=Qwen", "external.urls=", "agreement"):
        assert part in text


def test_the_settings_and_reasons_that_it_names_exist():
    settings = re.findall(r"`((?:reward|external|rollout|sampler)\.(?!jsonl)[a-z_]+)(?:=\w+)?`", TEXT)
    assert len(settings) >= 7
    for name in settings:
        assert configuration.unknown_setting(name) is None, name
    assert {"tool_error", "refused_call"} <= {reason.value for reason in Reason}
    assert "7 tries" in TEXT and to_json(RunConfig())["reward"]["retries"] == 7
