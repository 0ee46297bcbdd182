"""A small HTTP/1.1 client on asyncio streams: JSON in, a whole answer or server-sent events out. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from planner.errors import InvalidValueError

LIMIT_BYTES = 2**20  # longest line of an answer
KEPT_BYTES = 4000  # of an answer that is an error


@dataclass(frozen=True)
class Server:
    """Where a server answers. base: path before /v1."""

    host: str
    port: int
    tls: bool = False
    base: str = ""
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def url(self) -> str:
        """As people write it."""
        return f"http{'s' if self.tls else ''}://{self.host}:{self.port}{self.base}"


def server_of(url: str, key: str | None = None) -> Server:
    """The server of --url; key goes out as a bearer token. InvalidValueError when it is no URL."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidValueError(f"--url {url[:80]!r} is no URL", "", "Write for example --url http://127.0.0.1:8000.")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    return Server(parts.hostname, port or (443 if tls else 80), tls, base, headers)


class HttpError(Exception):
    """An answer that is not 2xx."""

    def __init__(self, status: int, text: str) -> None:
        self.status, self.text = status, text
        super().__init__(f"HTTP {status}: {' '.join(text.split())[:200]}")


@dataclass
class Answer:
    """Status, headers (lower case) and the stream behind them."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives, chunked coding taken off."""
        if "chunked" in self.headers.get("transfer-encoding", "").lower():
            while size := int((await self._line()).split(b";")[0] or b"0", 16):
                yield await self.reader.readexactly(size)
                await self.reader.readexactly(2)
            return
        left = int(self.headers.get("content-length", -1))
        while left and (data := await self.reader.read(2**16 if left < 0 else min(left, 2**16))):
            left -= len(data) if left > 0 else 0
            yield data

    async def _line(self) -> bytes:
        return (await self.reader.readline()).strip()

    async def text(self) -> str:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()]).decode("utf-8", errors="replace")

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each `data:` line of server-sent events, until [DONE]."""
        rest = b""
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                data = line.strip()
                if not data.startswith(b"data:"):
                    continue
                data = data[5:].strip()
                if data == b"[DONE]":
                    return
                with contextlib.suppress(ValueError):
                    yield json.loads(data)


@asynccontextmanager
async def ask(server: Server, path: str, body: Any = None) -> AsyncIterator[Answer]:
    """GET path, or POST body as JSON. Raises HttpError, OSError, asyncio.IncompleteReadError or ValueError (not HTTP)."""
    context = ssl.create_default_context() if server.tls else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context, limit=LIMIT_BYTES)
    try:
        data = b"" if body is None else json.dumps(body).encode()
        head = [
            f"{'GET' if body is None else 'POST'} {server.base}{path} HTTP/1.1",
            f"Host: {server.host}:{server.port}",
            "Connection: close",
            "Accept: application/json, text/event-stream",
            *(f"{name}: {value}" for name, value in server.headers),
        ]
        head += [] if body is None else ["Content-Type: application/json", f"Content-Length: {len(data)}"]
        writer.write("\r\n".join([*head, "", ""]).encode() + data)
        await writer.drain()
        answer = await _head(reader)
        if not 200 <= answer.status < 300:
            raise HttpError(answer.status, (await answer.text())[:KEPT_BYTES])
        yield answer
    finally:
        writer.close()
        with contextlib.suppress(OSError, ssl.SSLError):
            await writer.wait_closed()


async def _head(reader: asyncio.StreamReader) -> Answer:
    first = (await reader.readline()).split(maxsplit=2)
    if len(first) < 2 or not first[0].startswith(b"HTTP/"):
        raise ConnectionError("the server closed the connection" if not first else "the answer is not HTTP")
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    return Answer(int(first[1]), headers, reader)


async def get_json(server: Server, path: str, timeout_s: float) -> Any:
    """The JSON of a GET."""
    async with asyncio.timeout(timeout_s), ask(server, path) as answer:
        return json.loads(await answer.text())
