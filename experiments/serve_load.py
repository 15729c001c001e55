"""Many clients at once on the server: latencies, throughput, memory, slots, and whether answers stay right.

    python experiments/serve_load.py [--seconds=300] [--clients=64] [--out=experiments/results/serve_load.json]

A process serves the tiny model; another is its clients, who stream answers of mixed lengths, one after another, and of
whom one in ten goes away before the end. Every answer that comes whole is held against the same request asked alone,
both greedy. The same requests, cut short as often, also go to the engine itself without HTTP, in the server's own
process and in windows between those of the clients, so that both are measured on the same machine in the same minutes.
On two cores the clients' own work is a part of what it costs. Ends with code 1 where a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TIMES = {"first": "to the first text", "whole": "to the end"}
GONE_SHARE, GONE_MARGIN = 0.1, 0.02  # of all requests; how far off it may be, beyond what chance does
LENGTHS = (16, 48, 96, 160, 256)  # the most tokens of an answer
WINDOW = 15.0  # seconds of the engine alone, before, between and after the clients' windows
MEMORY_GROWTH, THROUGHPUT_SHARE = 0.05, 0.8
NAME = "tiny_base"
TOKENS, CPU = "envace_decoded_tokens", "process_cpu_seconds_total"  # of the server, in /metrics

# --- what is asked ---


def requests(count: int) -> list[dict[str, Any]]:
    """Bodies of different lengths: tasks with tools, whose answers end soon, and numbers, which go on and on."""
    from envace_jax.envs import tiny

    made = []
    for place, task in enumerate(tiny.tasks("heldout", count, seed=0)):
        rng = random.Random(place)
        numbers = str([rng.randint(0, 999) for _ in range(12)])
        more = {"tools": list(task.tools)} if place % 2 else {}
        body = {
            "model": NAME, "temperature": 0, "max_tokens": LENGTHS[place % len(LENGTHS)],
            "messages": [{"role": "user", "content": task.user_turns[0] if place % 2 else numbers}],
        }  # fmt: skip
        made.append(body | more)
    return made


@dataclasses.dataclass(frozen=True)
class Plan:
    """One after another, what a client asks; `cut`: after so many pieces of text it goes away, 0: before any."""

    body: int
    cut: int | None


def plan(rng: random.Random, pieces: list[int]) -> Plan:
    """`pieces`: how many each answer comes in when it is asked for alone. A client goes away before the last."""
    body = rng.randrange(len(pieces))
    return Plan(body, rng.randrange(max(1, pieces[body])) if rng.random() < GONE_SHARE else None)


# --- a client: HTTP by hand, so that it takes little time and can go away at any moment ---


@dataclasses.dataclass
class Answer:
    said: list[Any] | None = None  # [content, calls, finish reason]; None where the client went away
    pieces: int = 0  # events with text or calls
    first: float = 0.0  # seconds
    whole: float = 0.0


async def ask(port: int, body: dict[str, Any], cut: int | None = None) -> Answer:
    """Streams one answer. Raises RuntimeError for anything but a good one."""
    data = json.dumps({**body, "stream": True}).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n"
    started, answer = time.monotonic(), Answer()
    content, calls, reason = "", [], None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head.encode() + data)
        status = await reader.readline()
        if b" 200 " not in status:
            raise RuntimeError(f"the server said {status.decode().strip()}: {(await reader.read()).decode()[-300:]}")
        while await reader.readline() != b"\r\n":
            pass
        async for event in events(reader):
            for choice in event["choices"]:
                delta = choice["delta"]
                if delta.get("content") or delta.get("tool_calls"):
                    answer.first = answer.first or time.monotonic() - started
                    answer.pieces += 1
                content += delta.get("content") or ""
                calls += [[c["function"]["name"], c["function"]["arguments"]] for c in delta.get("tool_calls") or ()]
                reason = choice["finish_reason"] or reason
            if cut is not None and answer.pieces >= cut and reason is None:
                return answer
        if reason is None:
            raise RuntimeError("a stream ended without its end")
        answer.whole = time.monotonic() - started
        answer.first = answer.first or answer.whole
        answer.said = [content, calls, reason]
        return answer
    finally:
        writer.transport.abort()  # at once, whatever is still on its way


async def events(reader: asyncio.StreamReader):
    """Server-sent events of a chunked body."""
    text = b""
    while size := int(await reader.readline(), 16):
        text += (await reader.readexactly(size + 2))[:-2]
        *blocks, text = text.split(b"\n\n")
        for block in blocks:
            if block == b"data: [DONE]":
                return
            event = json.loads(block.removeprefix(b"data: "))
            if "error" in event:
                raise RuntimeError(f"an error under way: {event['error']}")
            yield event


async def metrics(port: int) -> dict[str, float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    _, text = (await reader.read()).decode().split("\r\n\r\n", 1)
    writer.close()
    lines = [line.rpartition(" ") for line in text.splitlines() if line[:1].isalpha()]
    return {name: float(value) for name, _, value in lines if "{" not in name}


# --- the clients' process ---


@dataclasses.dataclass
class Load:
    """What the clients saw."""

    answers: list[Answer] = dataclasses.field(default_factory=list)
    gone: int = 0
    wrong: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)  # by body
    errors: list[str] = dataclasses.field(default_factory=list)


async def client(
    port: int, bodies: list[Any], alone: list[Answer], rng: random.Random, until: float, load: Load
) -> None:
    pieces = [answer.pieces for answer in alone]
    while time.monotonic() < until:
        wanted = plan(rng, pieces)
        try:
            answer = await ask(port, bodies[wanted.body], wanted.cut)
        except (RuntimeError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            load.errors.append(f"{type(error).__name__}: {error}"[:300])
            continue
        if answer.said is None:
            load.gone += 1
            continue
        load.answers.append(answer)
        load.wrong[wanted.body] += answer.said != alone[wanted.body].said


async def emptied(port: int, seconds: float = 20) -> dict[str, float]:
    """What is still under way, once nothing is or the time is over."""
    end = time.monotonic() + seconds
    while True:
        now = await metrics(port)
        left = {name: now[f"envace_{name}"] for name in ("choices_under_way", "slots_taken", "prompts_waiting")}
        if not any(left.values()) or time.monotonic() > end:
            return left
        await asyncio.sleep(0.1)


async def play(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    port, bodies = server.port, requests(args.requests)
    alone = [await ask(port, body) for body in bodies]
    load, served, offline, memory, cpu = Load(), [], [], [], collections.Counter()

    async def engine_alone() -> None:
        before = await metrics(port)
        offline.append(await server.offline(args, [answer.pieces for answer in alone]))
        after = await metrics(port)
        cpu["engine"] += after[CPU] - before[CPU]
        cpu["engine_tokens"] += after[TOKENS] - before[TOKENS]

    await engine_alone()
    windows = max(1, round(args.seconds / 60))
    for window in range(windows):
        before, started, own = await metrics(port), time.monotonic(), time.process_time()
        until = started + args.seconds / windows
        clients = [
            asyncio.ensure_future(client(port, bodies, alone, random.Random(f"{window} {n}"), until, load))
            for n in range(args.clients)
        ]
        while time.monotonic() < until:
            await asyncio.sleep(min(5.0, args.seconds / 20))
            memory.append((await metrics(port))["process_resident_memory_bytes"])
        after, ended = await metrics(port), time.monotonic()
        served.append((after[TOKENS] - before[TOKENS]) / (ended - started))
        cpu["clients"] += time.process_time() - own
        cpu["server"] += after[CPU] - before[CPU]
        cpu["served_tokens"] += after[TOKENS] - before[TOKENS]
        await asyncio.gather(*clients)
        await engine_alone()
    left, last = await emptied(port), await metrics(port)
    asked = load.gone + len(load.answers)
    settled = memory[len(memory) // 5 :]  # buffers have grown by then
    tenth = max(1, len(settled) // 10)
    return {
        "clients": args.clients, "seconds": args.seconds, "slots": int(last["envace_slots"]), "cpus": os.cpu_count(),
        "answers": len(load.answers), "gone": load.gone, "gone_share": load.gone / max(1, asked),
        "errors": load.errors[:5], "error_count": len(load.errors),
        "wrong": sum(load.wrong.values()), "wrong_bodies": [bodies[at] for at, n in load.wrong.items() if n][:3],
        "left": left, "engine_faults": last["envace_engine_faults"],
        "seconds_to": {name: quantiles([getattr(a, name) for a in load.answers]) for name in TIMES},
        "tokens_per_second": {"served": served, "offline": offline},
        # Each window of the clients by those of the engine on either side of it.
        "throughput_share": mean([2 * rate / (offline[at] + offline[at + 1]) for at, rate in enumerate(served)]),
        "cpu_ms_per_token": {
            "engine": 1000 * cpu["engine"] / cpu["engine_tokens"],
            **{name: 1000 * cpu[name] / cpu["served_tokens"] for name in ("server", "clients")},
        },
        "memory_mb": [round(value / 2**20, 1) for value in memory],
        "memory_growth": mean(settled[-tenth:]) / mean(settled[:tenth]) - 1,
    }  # fmt: skip


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def quantiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        f"p{share}": round(ordered[min(len(ordered) * share // 100, len(ordered) - 1)], 4) for share in (50, 90, 99)
    }


def failures(found: dict[str, Any]) -> list[str]:
    """The checks that do not hold."""
    asked = max(1, found["gone"] + found["answers"])
    margin = GONE_MARGIN + 3 * (GONE_SHARE * (1 - GONE_SHARE) / asked) ** 0.5
    said = {
        f"{found['error_count']} errors, such as {found['errors']}": found["error_count"],
        f"{found['wrong']} answers differ from those given alone": found["wrong"],
        f"left under way: {found['left']}": any(found["left"].values()),
        f"the device failed {found['engine_faults']} times": found["engine_faults"],
        f"memory grew by {found['memory_growth']:.1%}": found["memory_growth"] > MEMORY_GROWTH,
        f"throughput is {found['throughput_share']:.1%} of the engine's": found["throughput_share"] < THROUGHPUT_SHARE,
        f"{found['gone_share']:.1%} of the clients went away": abs(found["gone_share"] - GONE_SHARE) > margin,
    }
    return [text for text, failed in said.items() if failed]


# --- the server's process ---


class Server:
    """The child: serves, and on demand measures its engine without HTTP."""

    def __init__(self, args: argparse.Namespace):
        command = [sys.executable, __file__, "--serve", f"--slots={args.slots}", f"--requests={args.requests}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.port = int(self.answer())

    def answer(self) -> str:
        for line in iter(self.process.stdout.readline, ""):
            if line.startswith("> "):
                return line[2:]
        raise SystemExit("the server ended")

    async def offline(self, args: argparse.Namespace, pieces: list[int]) -> float:
        """Tokens per second of the engine, with as many requests under way as there are clients."""
        seconds = min(WINDOW, args.seconds / 4)
        wanted = {"seconds": seconds, "clients": args.clients, "pieces": pieces}
        print(json.dumps(wanted), file=self.process.stdin, flush=True)
        return float(await asyncio.get_running_loop().run_in_executor(None, self.answer))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(60)


def serve_until_told(args: argparse.Namespace) -> None:
    """Serves on a free port, which it prints; then reads what to measure from stdin, until that ends."""
    import socket

    import uvicorn

    from configs import tiny
    from envace_jax import serve
    from envace_jax.config import from_config_dict
    from envace_jax.serving import completions
    from envace_jax.serving.app import Options, make_app
    from envace_jax.serving.protocol import ChatRequest

    config = from_config_dict(tiny.get_config())
    sampler = dataclasses.replace(
        config.sampler, slots=args.slots, cache_rows=4 * args.slots, refill_share=0.125, decode_chunk=16,
        prefill_lengths=(32, 128, 440), prefill_rows=(1, 8),
    )  # fmt: skip
    served = serve.load("asset:tiny_base", config=dataclasses.replace(config, sampler=sampler))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)
    server = uvicorn.Server(uvicorn.Config(make_app(served, Options()), log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    asked = [
        (completions.read_conversation(served, ChatRequest.model_validate(body), body), body["max_tokens"])
        for body in requests(args.requests)
    ]
    prompts = [(one.prompt, most) for one, most in asked]
    print(f"> {listener.getsockname()[1]}", flush=True)
    for line in sys.stdin:
        print(f"> {offline(served.engine, prompts, **json.loads(line))}", flush=True)
    server.should_exit = True
    thread.join()
    served.engine.stop()


def offline(engine: Any, prompts: list[Any], seconds: float, clients: int, pieces: list[int]) -> float:
    """Tokens that the engine draws per second while `clients` requests are always under way, cut short like theirs."""
    from envace_jax.sampling import SampleRequest

    rng, under_way = random.Random(0), {}
    changed = threading.Semaphore(0)
    before, started = engine.stats.decoded_tokens, time.monotonic()
    while time.monotonic() < started + seconds:
        while len(under_way) < clients:
            wanted = plan(rng, pieces)
            prompt, most = prompts[wanted.body]
            handle = engine.submit(SampleRequest(0, prompt, most, key_ids=(0, 0, 0), temperature=0.0))
            under_way[handle] = [wanted.cut, 0]
            handle.listen(changed.release)
        changed.acquire()
        while changed.acquire(blocking=False):
            pass
        for handle, seen in list(under_way.items()):
            seen[1] += len(handle.take())
            if handle.sample.done():
                del under_way[handle]
            elif seen[0] is not None and seen[1] >= seen[0]:
                engine.cancel(handle)
                del under_way[handle]
    rate = (engine.stats.decoded_tokens - before) / (time.monotonic() - started)
    for handle in under_way:
        engine.cancel(handle)
    return rate


# --- the command ---


def parse_arguments(given: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300, help="of load, the engine's own windows not counted")
    parser.add_argument("--clients", type=int, default=64, help="who stream at once")
    parser.add_argument("--requests", type=int, default=60, help="different ones")
    parser.add_argument("--slots", type=int, default=32, help="of the server")
    parser.add_argument("--out", type=Path, help="where what was measured is written, as JSON")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(given)


def main(given: list[str]) -> int:
    args = parse_arguments(given)
    if args.serve:
        serve_until_told(args)
        return 0
    server = Server(args)
    try:
        found = asyncio.run(play(args, server))
    finally:
        server.close()
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, text in TIMES.items():
        print(f"seconds {text}:", *(f"{name} {value:.3f}" for name, value in found["seconds_to"][name].items()))
    rates = {name: f"{mean(values):.0f}" for name, values in found["tokens_per_second"].items()}
    print(f"{found['answers']} answers, {found['gone_share']:.1%} of the clients went away; tokens per second: {rates}")
    print(f"throughput {found['throughput_share']:.1%} of the engine's, memory {found['memory_growth']:+.2%}")
    print("CPU milliseconds per token:", {name: round(value, 3) for name, value in found["cpu_ms_per_token"].items()})
    for failure in (failed := failures(found)):
        print(f"FAILED: {failure}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main(sys.argv[1:]))
