"""Makes the policy that a command line names: a checkpoint in this process, or a model behind an address."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from envace_jax import config as configuration
from envace_jax import fingerprint, main, parts, rehearsal, users
from envace_jax.benchmarks.flags import Flags
from envace_jax.benchmarks.policies import TOKENIZER, Local
from envace_jax.benchmarks.remote import Remote
from envace_jax.chat import Chat, load_tokenizer
from envace_jax.config import ConfigError, RunConfig, UserError
from envace_jax.endpoint import Endpoint, EndpointSettings
from envace_jax.models import hf
from envace_jax.rollout import Player

CONTEXT, RESPONSE = 20_000, 8_000  # tokens; the authors' for 8B
PREFILL, CACHE = (128, 512, 2048), (2048, 4096, 8192)  # padded shapes up to the context
SLOTS = 16


def chat_of(path: str, spelled_tags: bool = False) -> Chat:
    """The chat format of a model's folder."""
    return load_tokenizer(hf.resolve(configuration.model_path(path, "--model")), spelled_tags=spelled_tags)


@contextlib.contextmanager
def local(chosen: Flags) -> Iterator[tuple[Local, Chat]]:
    """A checkpoint in this process."""
    rehearsing = _rehearsal(chosen.rehearsal)
    folder = hf.resolve(configuration.model_path(chosen.model, "--model"))
    chat = load_tokenizer(folder, spelled_tags=chosen.spelled_tags)
    main.use_compilation_cache(chosen.config.compilation_cache)
    config = chosen.config
    if not config_says(chosen):
        config = sized(config, hf.read_config(folder).max_positions, chosen.context, chosen.response)
    mesh = main.prepare_devices(config)
    model, params = hf.load(folder, mesh, config.model.param_dtype)
    policy = parts.make_policy(config, model, mesh)
    player = Player(parts.make_sampler(config, policy, chat, mesh), policy.for_decoding(params))
    # With a config file the model is taken for a policy that such a run has trained, as when it is served.
    prompts = dataclasses.replace(parts.make_prompts(config, chat), as_sampled=chosen.own_config)
    limits = parts.make_limits(config)
    about = {
        "model": chosen.model, "weights": fingerprint.of_model(folder), "rehearsal": as_json(rehearsing),
        "temperature": chosen.temperature, "top_p": chosen.top_p, "spelled_tags": chosen.spelled_tags,
        "prompts": dataclasses.asdict(config.prompts) | {"as_sampled": prompts.as_sampled},
        "limits": dataclasses.asdict(limits), "compute_dtype": config.model.compute_dtype,
    }  # fmt: skip
    with _user(config, chosen.out) as user:
        yield Local(about, player, prompts, limits, chosen.temperature, chosen.top_p, user, rehearsing), chat


def config_says(chosen: Flags) -> bool:
    """Whether lengths are those of a config file."""
    return bool(chosen.own_config and not chosen.context and not chosen.response)


def sized(config: RunConfig, positions: int, context: int, response: int) -> RunConfig:
    """The settings with a context and responses of so many tokens (0: as many as suit the model), and on a CPU the type
    that it computes fast in. Raises ConfigError where they do not fit the model or each other."""
    context = context or min(CONTEXT, positions)
    response = response or min(RESPONSE, context * 2 // 5)
    if context > positions:
        raise ConfigError(f"--context={context}: the model knows {positions} positions")
    if response >= context:
        raise ConfigError(f"--response={response} leaves no room for a prompt in --context={context}")
    limits = dataclasses.replace(
        config.limits, act_context=context, act_response=response, rehearse_response=min(response, context // 2)
    )
    prompts = dataclasses.replace(
        config.prompts, max_act_prompt=context - response, max_rehearse_prompt=context - limits.rehearse_response
    )
    sampler = dataclasses.replace(
        config.sampler, slots=min(config.sampler.slots, SLOTS), max_length=context,
        prefill_lengths=tuple(length for length in PREFILL if length < context) or (context,),
        cache_lengths=(*(length for length in CACHE if length < context), context),
    )  # fmt: skip
    model = config.model
    if jax.default_backend() == "cpu":  # CPUs have no fast bfloat16
        model = dataclasses.replace(model, compute_dtype="float32", param_dtype="float32")
        sampler = dataclasses.replace(sampler, cache_dtype="float32")
    return dataclasses.replace(config, limits=limits, prompts=prompts, sampler=sampler, model=model)


@contextlib.contextmanager
def remote(chosen: Flags) -> Iterator[tuple[Remote, Chat]]:
    """A model behind an address."""
    request = request_of(chosen)
    limits = parts.make_limits(chosen.config)
    about = {
        "model": chosen.model, "server": "asked by its address", "rehearsal": request.get("rehearsal"),
        "temperature": chosen.temperature, "top_p": chosen.top_p, "max_tokens": request["max_tokens"],
        "limits": {name: getattr(limits, name) for name in ("user_turns", "parallel_calls")},
    }  # fmt: skip
    if not chosen.server.startswith(("http://", "https://")):
        raise UserError(f"--server={chosen.server}: expected an address such as http://host:8000/v1")
    endpoint = Endpoint(EndpointSettings((chosen.server,), chosen.model, timeout_s=600.0))
    try:
        with _user(chosen.config, chosen.out) as user:
            policy = Remote(about, endpoint, chosen.temperature, chosen.top_p, user, request, limits)
            yield policy, chat_of(TOKENIZER)
    finally:
        endpoint.close()


def request_of(chosen: Flags) -> dict[str, Any]:
    """What a server is asked beside messages and sampling."""
    rehearsing = _rehearsal(chosen.rehearsal)
    rehearsal = {} if rehearsing is None else {"rehearsal": {"mode": rehearsing.mode, "n": rehearsing.n, "reuse": True}}
    return {"max_tokens": chosen.response or RESPONSE, **rehearsal}


@contextlib.contextmanager
def _user(config: RunConfig, folder: Path) -> Iterator[users.SimulatedUser | None]:
    folder.mkdir(parents=True, exist_ok=True)
    with users.chosen(config.user, folder) as user:
        yield user


def _rehearsal(text: str) -> rehearsal.Settings | None:
    """Of a flag such as parallel:4. Raises UserError."""
    if text == "none":
        return None
    try:
        return rehearsal.parse(text)
    except ValueError as error:
        raise UserError(f"--rehearsal: {error}") from None


def as_json(settings: rehearsal.Settings | None) -> dict[str, Any] | None:
    return None if settings is None else dataclasses.asdict(settings)
