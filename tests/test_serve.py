"""The command: its flags, a start and an end in a process of its own, and its settings without a configuration."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import types

import httpx
import pytest
import serving
import uvicorn
from conftest import REPOSITORY

from envace_jax import serve
from envace_jax.config import RunConfig, validate
from envace_jax.models.config import QwenConfig
from envace_jax.serving.app import make_app

TINY = ("--model=asset:tiny_base", "--config=configs/tiny.py")


@pytest.mark.parametrize(
    "flags, words",
    [
        ((), "--model is missing"),
        (("--config=configs/qwen3_1p7b_lora.py",), "model.path is without them"),
        (("--model=nowhere/there/is",), "no such folder"),
        (("--model=asset:huge",), "no such asset"),
        ((*TINY, "--rehearsal=twice:4"), "'twice:4' is not MODE or MODE:N"),
        ((*TINY, "--rehearsal=parallel:0"), "N at least 1"),
        ((*TINY, "--port=eight"), "--port: invalid int value: 'eight'"),
        ((*TINY, "--port=99999"), "--port=99999"),
        ((*TINY, "--slots=-1"), "--slots=-1 must be at least 0"),
        ((*TINY, "--max_length=9999"), "--max_length=9999 is more than the 2048 positions"),
        (("--model=asset:tiny_base", "--max_length=9999"), "--max_length=9999 is more than the 2048 positions"),
        ((*TINY, "--api_key_variable=ENVACE_NO_SUCH_KEY"), "there is no such variable"),
        ((*TINY, "--temperature=1"), "Unknown command line flag 'temperature'"),
        ((*TINY, "--config.sampler.slotz=3"), "sampler.slotz"),
    ],
)
def test_bad_flags_are_answered_by_one_line(flags, words, capsys):
    assert serve.main(["serve", "--port=0", *flags]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and words in lines[0]


def test_a_port_that_is_taken_is_said_before_anything_is_loaded(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["serve", *TINY, f"--port={port}"]) == 2
    assert f"--host=127.0.0.1 --port={port}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, key, guarded",
    [
        ("127.0.0.1", "", True),
        ("localhost", "", True),
        ("127.0.0.2", "", True),
        ("0.0.0.0", "", False),
        ("127.0.0.1", "sesame", False),
    ],
)
def test_on_this_machine_alone_it_has_its_own_names(host, key, guarded, monkeypatch):
    """By where it listens, not by how that was written."""
    seen = []
    monkeypatch.setenv("ENVACE_TEST_KEY", key)
    monkeypatch.setattr(serve, "load", lambda *_, **__: types.SimpleNamespace(engine=types.SimpleNamespace(stop=int)))
    monkeypatch.setattr(serve, "_serve", lambda _, options, listener, __: (seen.append(options), listener.close()))
    more = ["--api_key_variable=ENVACE_TEST_KEY"] if key else []
    assert serve.main(["serve", "--model=asset:tiny_base", "--port=0", f"--host={host}", *more]) == 0
    assert set(seen[0].hosts) == ({"localhost", "127.0.0.1", "::1", host} if guarded else set())


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_it_at_once(second):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "go on"}]}
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with serving.scripted_model(lambda prompt, request: "x" * 3000, pace_s=0.2) as model:
        app, listener = make_app(model), serve._listen("127.0.0.1", 0)
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=200)
        server = serve._Server(config, app.state.service)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            while not model.engine.running:
                time.sleep(0.02)
            server.handle_exit(signal.SIGTERM, None)
            thread.join(1)
            assert thread.is_alive()  # the answer takes minutes
            server.handle_exit(second, None)
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize("positions", [512, 2048, 40_960])
def test_the_settings_for_a_model_fit_it(positions):
    model = QwenConfig(
        vocab_size=96, width=32, layers=2, heads=2, kv_heads=1, head_dim=16, ffn=48, max_positions=positions
    )
    made = serve.settings_for(model)
    for config in (made, serve._resized(made, 3, 300)):
        sampler, limits, prompts = config.sampler, config.limits, config.prompts
        assert sampler.max_length == sampler.cache_lengths[-1] <= positions
        assert max(sampler.prefill_lengths) <= sampler.max_length and sampler.cache_rows != 1
        assert limits.act_context <= sampler.max_length
        assert prompts.max_act_prompt + limits.act_response <= limits.act_context + limits.act_response
        assert prompts.max_rehearse_prompt + limits.rehearse_response <= sampler.max_length
    assert made.sampler.slots == 8 and serve._resized(made, 3, 0).sampler.slots == 3
    assert serve._resized(RunConfig(), 0, 0) == RunConfig()
    with pytest.raises(ValueError, match="data.source"):
        validate(made)  # a run of training would need more


@pytest.mark.slow
def test_it_starts_serves_and_finishes_what_runs_before_it_ends(tmp_path):
    """SIGTERM while a request is under way and another waits to begin: the one is answered, the other refused."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "ENVACE_TEST_KEY": "sesame", "PYTHONPATH": str(REPOSITORY)}
    command = [
        *(sys.executable, "-m", "envace_jax.serve", *TINY, "--port=0", "--no_warm_up", "--slots=2"),
        *("--api_key_variable=ENVACE_TEST_KEY", "--name=mine", "--config.sampler.decode_chunk=1", "--grace=60"),
    ]
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            address = next(found[1] for line in process.stdout if (found := re.search(r"at (http://\S+)/v1", line)))
            headers = {"authorization": "Bearer sesame"}
            body = {"model": "mine", "messages": [{"role": "user", "content": "hello there , how are you today ?"}]}
            sampled = body | {"temperature": 2, "n": 8, "seed": 1}
            with concurrent.futures.ThreadPoolExecutor(1) as thread:
                running = thread.submit(
                    httpx.post, f"{address}/v1/chat/completions", json=sampled, headers=headers, timeout=120
                )
                while "envace_slots_taken 2.0" not in httpx.get(f"{address}/metrics").text:
                    assert not running.done()
                    time.sleep(0.02)
                process.send_signal(signal.SIGTERM)
                answer = running.result()
            assert answer.status_code == 200 and len(answer.json()["choices"]) == 8
            assert process.wait(60) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{address}/health")
            assert "stopping: what is under way is finished" in process.stderr.read()
        finally:
            process.kill()
