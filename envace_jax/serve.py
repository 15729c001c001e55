"""Serves a checkpoint with OpenAI's chat completions, for any client or agent harness (docs/serving.md).

    python -m envace_jax.serve --model=PATH [--config=configs/NAME.py] [--port=8000] [--rehearsal=parallel:4] ...

`--model` is a folder in Hugging Face layout, a hub id, or "asset:NAME". The settings of sampler, mesh, prompts and
limits are those of a configuration file, or follow from the model. SIGTERM and Ctrl-C end the server in order: what is
under way is finished within `--grace` seconds. Bad input is answered by lines on stderr and exit code 2.
"""

from __future__ import annotations

import argparse
import dataclasses
import ipaddress
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import uvicorn

from envace_jax import config as configuration
from envace_jax import parts, rehearsal
from envace_jax.chat import load_tokenizer
from envace_jax.config import ConfigError, LimitsConfig, ModelConfig, PromptConfig, RunConfig, SamplerConfig
from envace_jax.main import BAD_INPUT, is_message, prepare_devices, read_flags, use_compilation_cache
from envace_jax.models import hf
from envace_jax.models.config import QwenConfig
from envace_jax.serving.app import Options, Service, make_app
from envace_jax.serving.completions import Served
from envace_jax.serving.engine import Engine
from envace_jax.serving.text import TokenBytes

LOOPBACK = ("127.0.0.1", "::1")


def load(
    path: str, *, config: RunConfig | None = None, name: str = "", slots: int = 0, max_length: int = 0,
    warm_up: bool = True,
) -> Served:  # fmt: skip
    """Loads a checkpoint and starts an engine on it, which `served.engine.stop()` ends.

    Args:
      path: a folder in Hugging Face layout, a hub id, or "asset:NAME".
      config: the settings of sampler, mesh, prompts and limits; None: those of `settings_for` the model. With one the
        model is taken for a policy that such a run has trained: earlier messages stand in its prompts as it sampled
        them (`roles.Prompts.as_sampled`), and not as Qwen3's template has them.
      name: what clients call the model; by default the last part of `path`.
      slots, max_length: of the sampler, where they are to differ from the configuration's.
      warm_up: compiles everything first, so that no request waits for that.

    Raises ValueError (ConfigError, a file that is wrong) or FileNotFoundError, one line each.
    """
    folder = hf.resolve(configuration.model_path(path, "--model"))
    chat = load_tokenizer(folder)
    token_bytes = TokenBytes(chat.tokenizer)
    trained = config is not None
    own = hf.read_config(folder)
    config = settings_for(own) if config is None else config
    config = _resized(config, slots, max_length)
    if config.sampler.max_length > own.max_positions:
        where = "--max_length" if max_length else "sampler.max_length"
        raise ConfigError(
            f"{where}={config.sampler.max_length} is more than the {own.max_positions} positions of {path}"
        )
    mesh = prepare_devices(config)
    model, params = hf.load(folder, mesh, config.model.param_dtype)
    policy = parts.make_policy(config, model, mesh)
    sampler, params = parts.make_sampler(config, policy, chat, mesh), policy.for_decoding(params)
    if warm_up:
        print(f"compiling {sampler.buckets.compile_bound()} programs", flush=True)
        sampler.warm_up(params)
    engine = Engine(sampler, params)
    engine.start()
    prompts = dataclasses.replace(parts.make_prompts(config, chat), as_sampled=trained)
    return Served(
        engine=engine, chat=chat, prompts=prompts, limits=parts.make_limits(config),
        name=name or Path(path.removeprefix(configuration.ASSET_PREFIX)).name, created=int(time.time()),
        token_bytes=token_bytes,
    )  # fmt: skip


def settings_for(model: QwenConfig) -> RunConfig:
    """The settings where no configuration is given: the library's, with lengths that the model knows.

    On a CPU everything is float32 and few conversations are kept; elsewhere bfloat16, and pages for 65,536 tokens.
    """
    on_cpu = jax.default_backend() == "cpu"
    length = min(4_096 if on_cpu else 16_384, model.max_positions)
    response = min(8_000, length // 4)
    if on_cpu:
        own, sampler = ModelConfig(compute_dtype="float32"), SamplerConfig(slots=8, cache_dtype="float32")
    else:
        own = ModelConfig(param_dtype="bfloat16")
        sampler = SamplerConfig(slots=16, cache_rows=256, pages=max(65_536, 2 * length) // 64, page_size=64)
    return dataclasses.replace(
        RunConfig(),
        model=own,
        sampler=_lengths(sampler, length),
        prompts=PromptConfig(max_act_prompt=length - response, max_rehearse_prompt=length - response),
        limits=LimitsConfig(act_context=length, act_response=response, rehearse_response=response),
    )


def _resized(config: RunConfig, slots: int, max_length: int) -> RunConfig:
    sampler = config.sampler
    if slots:
        sampler = dataclasses.replace(sampler, slots=slots, cache_rows=max(sampler.cache_rows, 2 * slots))
    if not max_length:
        return dataclasses.replace(config, sampler=sampler)
    sampler = _lengths(sampler, max_length)
    limits, prompts, length = config.limits, config.prompts, sampler.max_length
    context = min(limits.act_context, length)
    response = min(limits.rehearse_response, length // 4)
    return dataclasses.replace(
        config,
        sampler=sampler,
        limits=dataclasses.replace(
            limits,
            act_context=context,
            act_response=min(limits.act_response, context // 4),
            rehearse_response=response,
        ),
        prompts=dataclasses.replace(
            prompts,
            max_act_prompt=min(prompts.max_act_prompt, context),
            max_rehearse_prompt=min(prompts.max_rehearse_prompt, length - response),
        ),
    )


def _lengths(sampler: SamplerConfig, length: int) -> SamplerConfig:
    """The sampler with streams of this length, and the padded shapes that are of use for it."""
    shorter = tuple(size for size in sampler.cache_lengths if size < length)
    prefill = tuple(size for size in sampler.prefill_lengths if size < length) or (length,)
    return dataclasses.replace(sampler, max_length=length, cache_lengths=(*shorter, length), prefill_lengths=prefill)


# --- the command ---


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def _flags() -> argparse.ArgumentParser:
    parser = _Parser("envace_jax.serve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="the checkpoint; by default model.path of the configuration")
    parser.add_argument("--name", default="", help="what clients call it; by default the last part of its path")
    parser.add_argument("--host", default="127.0.0.1", help="by default only this machine is served")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    parser.add_argument("--api_key_variable", default="", help="the environment variable that holds the key to ask for")
    parser.add_argument("--rehearsal", default="none", help="none, parallel:N or sequential:N, for requests with tools")
    parser.add_argument("--slots", type=int, default=0, help="sequences decoded side by side")
    parser.add_argument("--max_length", type=int, default=0, help="tokens of a prompt and its answer together")
    parser.add_argument("--queue", type=int, default=Options.queue, help="choices that may wait for a slot")
    parser.add_argument("--max_body", type=int, default=Options.max_body, help="bytes of a request")
    parser.add_argument("--grace", type=int, default=30, help="seconds to finish what is under way at the end")
    parser.add_argument("--no_warm_up", action="store_true", help="compile when it is needed, not before")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs the command with `arguments` (the program's name first) until it is stopped; returns its exit code."""
    try:
        own, rest = _flags().parse_known_args(list(arguments[1:]))
        config = _configuration(arguments[0], rest) if rest else None
        options = _options(own)
        path = own.model or (config.model.path if config else "")
        if config is not None and config.lora.rank and not own.model:
            raise ConfigError("--model is missing: the configuration trains adapters, and model.path is without them")
        if not path:
            raise ConfigError("--model is missing; try --model=asset:tiny_base --config=configs/tiny.py")
        use_compilation_cache(config.compilation_cache if config else "")
        listener = _listen(own.host, own.port)
        options = dataclasses.replace(options, hosts=_names(own.host, listener, options.api_key))
        print(f"loading {path}", flush=True)
        served = load(
            path, config=config, name=own.name, slots=own.slots, max_length=own.max_length,
            warm_up=not own.no_warm_up,
        )  # fmt: skip
    except (ValueError, OSError) as error:
        if not is_message(error):
            raise
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        return BAD_INPUT
    try:
        _serve(served, options, listener, own.grace)
    finally:
        served.engine.stop()
    return 0


def _configuration(program: str, rest: Sequence[str]) -> RunConfig:
    # It is checked as a whole, and no data are read here.
    given = any(argument.lstrip("-").partition("=")[0] == "config" for argument in rest)
    data = ("--config.data.source=tiny", "--config.data.count=1") if given else ()
    return read_flags([program, *rest, *data])[0]


def _options(own: argparse.Namespace) -> Options:
    for name, least in (("slots", 0), ("max_length", 0), ("queue", 0), ("max_body", 1), ("grace", 0)):
        if getattr(own, name) < least:
            raise ConfigError(f"--{name}={getattr(own, name)} must be at least {least}")
    key = os.environ.get(own.api_key_variable, "") if own.api_key_variable else ""
    if own.api_key_variable and not key:
        raise ConfigError(f"--api_key_variable={own.api_key_variable}: there is no such variable, or it is empty")
    return Options(
        api_key=key,
        max_body=own.max_body,
        queue=own.queue,
        rehearsal=rehearsal.parse(own.rehearsal),
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"--host={host} --port={port}: {error}") from None


def _names(host: str, listener: socket.socket, key: str) -> tuple[str, ...]:
    """What the server may be called; none: behind a key, or for other machines to reach, it may have any name."""
    address = listener.getsockname()[0]
    return () if key or not _is_loopback(address) else ("localhost", *LOOPBACK, address, host.lower())


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


class _Server(uvicorn.Server):
    """Lets nothing new in once it was told to stop; told again, by whichever signal, it ends at once."""

    def __init__(self, config: uvicorn.Config, service: Service):
        super().__init__(config)
        self._service = service

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._service.stopping:
            print("stopping: what is under way is finished; a second signal stops at once", file=sys.stderr, flush=True)
        self._service.stopping = True
        self.force_exit = self.should_exit
        super().handle_exit(sig, frame)


def _serve(served: Served, options: Options, listener: socket.socket, grace: int) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    app = make_app(served, options)
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, ws="none", timeout_graceful_shutdown=grace,
        timeout_keep_alive=60,  # between two steps of an agent
    )  # fmt: skip
    for number in (signal.SIGTERM, signal.SIGINT):  # uvicorn hands them back in the end
        signal.signal(number, lambda *_: None)
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    if not options.api_key and not _is_loopback(host):
        print(f"warning: whoever reaches {address} may use it; --api_key_variable asks for a key", file=sys.stderr)
    print(f"serving {served.name} at {address}/v1, {served.engine.max_length} tokens of context", flush=True)
    _Server(config, app.state.service).run(sockets=[listener])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
