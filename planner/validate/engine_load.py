"""The load of a plan against an OpenAI-compatible server: arrivals, requests, one sample a request.

Open loop: Poisson arrivals at the planned rate, whatever the server does. Closed loop: the planned number of users, each with
one request in flight. Fixed seed; warm-up requests are sent before and not counted.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import EngineFailedError
from planner.validate.engine_http import HttpError, Server, ask, get_json

ENOUGH_REQUESTS = 45  # 0.95**45 < 0.1: when so many keep a limit, so does the 95th percentile, at 80% confidence
DURATION_S, LONGEST_S = 60.0, 600.0  # when neither --requests nor --duration is given
ANSWER_LIMIT_S = 600.0
WARM_UP = 2
BAD_REQUEST = range(400, 500)
Tell = Callable[[str, float, float | None], None]
Lengths = tuple[int, int]


@dataclass(frozen=True)
class Load:
    """What is sent. lengths: (prompt, answer) tokens, taken in turn. Exactly one of rate_per_s and concurrency is set."""

    lengths: tuple[Lengths, ...]
    rate_per_s: float | None = None
    concurrency: int | None = None
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0

    def over(self, sent: int, elapsed_s: float) -> bool:
        """Whether the last request has been sent."""
        if self.requests is None and self.duration_s is None:
            return elapsed_s >= LONGEST_S or (elapsed_s >= DURATION_S and sent >= ENOUGH_REQUESTS)
        by_count = self.requests is not None and sent >= self.requests
        return by_count or (self.duration_s is not None and elapsed_s >= self.duration_s)


@dataclass(frozen=True)
class Sample:
    """One request, seconds since the load began. ttft and tpot are None where the server does not stream, or for one token."""

    sent_s: float
    ended_s: float
    input_tokens: int
    output_tokens: int
    ttft_s: float | None = None
    tpot_s: float | None = None
    error: str = ""

    @property
    def e2e_s(self) -> float:
        """From sending to the last token."""
        return self.ended_s - self.sent_s


@dataclass(frozen=True)
class Style:
    """What this server accepts, from most exact to least."""

    ids: bool
    ignore_eos: bool
    stream: bool
    words_per_token: float = 1.0
    words_offset: float = 0.0


STYLES = (Style(True, True, True), Style(False, True, True), Style(False, False, True), Style(False, False, False))


@dataclass(frozen=True)
class Client:
    """How requests are made: server, model name, style, and the vocabulary that prompts are drawn from."""

    server: Server
    model: str
    style: Style
    vocab: int

    def prompt(self, tokens: int, rng: random.Random) -> list[int] | str:
        """A random prompt of so many tokens, so that no prefix is shared."""
        if self.style.ids:
            low, high = self.vocab // 10, max(self.vocab // 10 + 1, self.vocab * 9 // 10)
            return [rng.randrange(low, high) for _ in range(tokens)]
        count = max(1, round(tokens * self.style.words_per_token + self.style.words_offset))
        return " ".join("".join(rng.choice("abcdefghijklmnopqrstuvwxyz") for _ in range(3)) for _ in range(count))

    def body(self, prompt: list[int] | str, output_tokens: int) -> dict[str, Any]:
        """The JSON of a completion request."""
        body: dict[str, Any] = {
            "model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0, "stream": self.style.stream,
        }  # fmt: skip
        if self.style.ignore_eos:
            body["ignore_eos"] = True
            body["stream_options"] = {"include_usage": True}
        return body if self.style.stream else {k: v for k, v in body.items() if k not in ("stream", "stream_options")}


async def connect(server: Server, names: Sequence[str], vocab: int, longest: int, timeout_s: float) -> Client:
    """Find the model's name and what the server accepts, by asking it. EngineFailedError when it refuses everything."""
    said = ""
    for model in await _model_names(server, names, timeout_s):
        for style in STYLES:
            client = Client(server, model, style, vocab)
            tried = await send(client, (8, 2), random.Random(0), time.perf_counter(), timeout_s)
            if not tried.error:
                return client if style.ids else await _measure_words(client, longest, timeout_s)
            said = said or tried.error
            if not tried.error.startswith(tuple(f"HTTP {n}" for n in BAD_REQUEST)):
                raise EngineFailedError(f"{server.url} failed at a first request", tried.error, "See its log.")
    raise EngineFailedError(
        f"{server.url} refuses completion requests", said, "Check the model's name (--env SERVED_NAME=...) and --url."
    )


async def _model_names(server: Server, names: Sequence[str], timeout_s: float) -> list[str]:
    """Names to try: those of ours that the server lists, its only one, then the rest of ours."""
    try:
        listed = [str(row["id"]) for row in (await get_json(server, "/v1/models", timeout_s))["data"]]
    except (HttpError, OSError, ValueError, KeyError, TypeError, TimeoutError, EOFError):
        listed = []
    known = [name for name in names if name in listed]
    only = listed if len(listed) == 1 else []
    return list(dict.fromkeys([*known, *only, *names]))


async def _measure_words(client: Client, longest: int, timeout_s: float) -> Client:
    """How many words make a token here: two prompts of known words, and what the server counts."""
    counts = []
    plain = replace(client, style=replace(client.style, stream=False))
    for words in (max(8, longest // 8), max(16, longest // 4)):
        found = await send(plain, (words, 1), random.Random(words), time.perf_counter(), timeout_s)
        counts.append((words, found.input_tokens))
    (w1, t1), (w2, t2) = counts
    if t2 <= t1 or w2 <= w1:
        return client
    slope = (w2 - w1) / (t2 - t1)
    return replace(client, style=replace(client.style, words_per_token=slope, words_offset=w1 - slope * t1))


async def send(client: Client, lengths: Lengths, rng: random.Random, began: float, limit_s: float) -> Sample:
    """One request. Whatever goes wrong is in the sample's `error`."""
    prompt = client.prompt(lengths[0], rng)
    sent = time.perf_counter()
    error, first, last, counted = "", None, sent, 0
    usage: dict[str, Any] = {}
    try:
        async with asyncio.timeout(limit_s):
            async for event, at in _events(client, client.body(prompt, lengths[1])):
                if event.get("error"):
                    error = str(event["error"])[:200]
                if event.get("choices") and not _only_the_end(event):
                    first, last, counted = first or at, at, counted + 1
                usage = event.get("usage") or usage
    except HttpError as refused:
        error = str(refused)
    except TimeoutError:
        error = f"no whole answer within {limit_s:g} s"
    except (OSError, ValueError, EOFError) as broken:
        error = f"{type(broken).__name__}: {broken}"[:200]
    if not error and not counted:
        error = "an answer without tokens"
    output = int(usage.get("completion_tokens") or counted)
    streams = client.style.stream and first is not None
    return Sample(
        sent - began,
        last - began,
        int(usage.get("prompt_tokens") or lengths[0]),
        output,
        first - sent if streams and first is not None else None,
        (last - first) / (output - 1) if streams and first is not None and output > 1 else None,
        error,
    )


def _only_the_end(event: dict[str, Any]) -> bool:
    """A last event that brings the finish reason and no text."""
    choice = event["choices"][0]
    return bool(choice.get("finish_reason")) and not choice.get("text") and not choice.get("token_ids")


async def _events(client: Client, body: dict[str, Any]) -> AsyncIterator[tuple[dict[str, Any], float]]:
    async with ask(client.server, "/v1/completions", body) as answer:
        if client.style.stream:
            async for event in answer.events():
                yield event, time.perf_counter()
        else:
            tree = json.loads(await answer.text())
            yield tree, time.perf_counter()


async def warm_up(clients: Sequence[Client], load: Load, tell: Tell, limit_s: float = ANSWER_LIMIT_S) -> None:
    """Requests to every server that are not counted."""
    tell("warming up", 0, None)
    warm = [send(c, load.lengths[0], random.Random(-1 - i), 0.0, limit_s) for c in clients for i in range(WARM_UP)]
    await asyncio.gather(*warm)


async def run_load(clients: Sequence[Client], load: Load, tell: Tell, limit_s: float = ANSWER_LIMIT_S) -> list[Sample]:
    """Warm every server up, then send the load to them in turn and wait for all answers."""
    rng = random.Random(load.seed)
    await warm_up(clients, load, tell, limit_s)
    began, done = time.perf_counter(), [0]

    async def one(index: int) -> Sample:
        lengths = load.lengths[index % len(load.lengths)]
        client, draw = clients[index % len(clients)], random.Random(load.seed * 1_000_003 + index)
        sample = await send(client, lengths, draw, began, limit_s)
        done[0] += 1
        tell("requests answered", done[0], load.requests)
        return sample

    if load.concurrency is not None:
        return await _closed(load, one, began)
    return await _open(load, one, began, rng)


async def _open(load: Load, one: Callable[[int], Any], began: float, rng: random.Random) -> list[Sample]:
    tasks: list[asyncio.Task[Sample]] = []
    due, rate = began, load.rate_per_s or 1.0
    async with asyncio.TaskGroup() as group:
        while not load.over(len(tasks), due - began):
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            tasks.append(group.create_task(one(len(tasks))))
            due += rng.expovariate(rate)
    return [task.result() for task in tasks]


async def _closed(load: Load, one: Callable[[int], Any], began: float) -> list[Sample]:
    samples: list[Sample] = []
    sent = [0]

    async def user() -> None:
        while not load.over(sent[0], time.perf_counter() - began):
            sent[0] += 1
            samples.append(await one(sent[0] - 1))

    async with asyncio.TaskGroup() as group:
        for _ in range(load.concurrency or 1):
            group.create_task(user())
    return sorted(samples, key=lambda s: s.sent_s)
