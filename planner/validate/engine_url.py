"""`--url`: a server that runs already is loaded; nothing is started, nothing stopped. One that cannot be reached is told at once."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time

from planner.errors import EngineFailedError
from planner.plan import Plan
from planner.validate.engine_http import HttpError, Server, ask, server_of
from planner.validate.engine_load import Tell
from planner.validate.engine_run import EngineRun, Launch, Options, check_gpus
from planner.validate.engine_serve import ONE_TRY_S, Watch, loaded

PATIENCE_S, AGAIN_S = 3.0, 0.3
NO_ENTRY = (401, 403)
START_IT = "Start the server first, or leave --url out to have the emitted files started."
CHECK_IT = "Check --url."


def load_url(plan: Plan, launch: Launch, options: Options, tell: Tell) -> EngineRun:
    """Load the server of --url."""
    server = server_of(options.url or "", options.env.get("API_KEY"))
    ends = time.monotonic() + options.timeout_s
    asyncio.run(reach(server, launch.health, min(PATIENCE_S, options.timeout_s)))
    engine = plan.deployment.engine if plan.deployment else ""
    watch = Watch(engine, ends, options.timeout_s, stage="waiting for the server")
    notes = [f"The server at {server.url} was running already: that it is the planned one is taken on trust."]
    about = (check_gpus(plan, options)[0], notes)
    return loaded([server], plan, launch, options, watch, tell, lambda: "", about)


async def reach(server: Server, path: str, patience_s: float) -> None:
    """One good answer of the health path. EngineFailedError with the reason; what may pass is tried again for patience_s."""
    until = time.monotonic() + patience_s
    while True:
        try:
            async with asyncio.timeout(ONE_TRY_S), ask(server, path) as answer:
                await answer.text()
            return
        except (HttpError, OSError, ValueError, EOFError) as error:
            lasting = isinstance(error, HttpError) and error.status < 500
            if lasting or isinstance(error, socket.gaierror | ssl.SSLError) or time.monotonic() > until:
                raise unreachable(server, path, error) from None
        await asyncio.sleep(AGAIN_S)


def unreachable(server: Server, path: str, error: Exception) -> EngineFailedError:
    """What is wrong with --url, and the next step."""
    url = server.url
    if isinstance(error, socket.gaierror):
        return EngineFailedError(
            f"cannot resolve the host {server.host[:80]!r} of --url", error.strerror or "", CHECK_IT
        )
    if isinstance(error, HttpError):
        what = f"{url}{path} answers HTTP {error.status}"
        if error.status in NO_ENTRY:
            return EngineFailedError(what, "the server wants a key", "Give it as --env API_KEY=$API_KEY.")
        if error.status < 500:
            return EngineFailedError(what, "this is not the planned engine's server, or not its root", CHECK_IT)
        return EngineFailedError(what, "the server is not ready", "Wait until it is, or see its log.")
    if isinstance(error, ConnectionRefusedError):
        return EngineFailedError(f"{url} refused the connection", "nothing listens there", START_IT)
    if isinstance(error, TimeoutError):
        return EngineFailedError(
            f"{url} did not answer within {ONE_TRY_S:g} s", "a firewall or a server that hangs", CHECK_IT
        )
    if isinstance(error, ssl.SSLError):
        return EngineFailedError(
            f"{url} does not speak TLS as asked", error.reason or "", "Check http or https in --url."
        )
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return EngineFailedError(f"{url}{path} cannot be read", reason[:120], CHECK_IT)
