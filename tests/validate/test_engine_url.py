"""`--url` of a server that cannot be loaded: told at once, each reason in its own words, with a next step."""

import asyncio
import contextlib
import http.server
import socket
import threading

import pytest

from planner.cli.main import run
from planner.errors import EngineFailedError
from planner.validate import engine_url
from planner.validate.engine_http import Server
from planner.validate.engine_process import free_port
from planner.validate.engine_run import Launch, Options
from planner.validate.engine_url import load_url, reach
from tests.validate.engine_helpers import saved, serving_plan


@contextlib.contextmanager
def answering(*statuses):
    """A server that gives these answers in turn, the last one from then on; yields (port, list of paths asked)."""
    left, asked = list(statuses), []

    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def do_GET(self):
            asked.append(self.path)
            self.send_response(left.pop(0) if len(left) > 1 else left[0])
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port, asked
        server.shutdown()


def told(url, tmp_path, monkeypatch, capsys):
    """Its one line. Should it wait until --timeout, that is what the line says."""
    monkeypatch.setattr("planner.report.progress.PATIENCE_S", 0.0)
    path = saved(serving_plan(), tmp_path)
    assert run(["validate", str(path), "--level", "engine", "--url", url, "--timeout", "20s"]) == 2
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1, err
    assert "starting the engine" not in err
    return err


def test_a_name_that_is_none(tmp_path, monkeypatch, capsys):
    async def unknown(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio, "open_connection", unknown)
    err = told("not-a-url", tmp_path, monkeypatch, capsys)
    assert "cannot resolve the host 'not-a-url' of --url: Name or service not known. Check --url." in err


def test_a_refused_port(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_url, "PATIENCE_S", 0.5)
    err = told(f"127.0.0.1:{free_port()}", tmp_path, monkeypatch, capsys)
    assert "refused the connection: nothing listens there. Start the server first" in err


@pytest.mark.parametrize(
    ("status", "said"), [(404, "not the planned engine's server"), (401, "--env API_KEY"), (503, "not ready")]
)
def test_a_server_that_says_no(status, said, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_url, "PATIENCE_S", 0.5)
    with answering(status) as (port, asked):
        err = told(f"http://127.0.0.1:{port}", tmp_path, monkeypatch, capsys)
    assert f"/health answers HTTP {status}: " in err
    assert said in err
    assert len(asked) == 1 or status == 503


def test_something_that_does_not_speak_http(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(engine_url, "PATIENCE_S", 0.5)

    def greet(listener):
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                client.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                client.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=greet, args=(listener,), daemon=True).start()
        err = told(f"127.0.0.1:{listener.getsockname()[1]}", tmp_path, monkeypatch, capsys)
    assert "cannot be read" in err


def test_a_server_that_hangs(monkeypatch):
    monkeypatch.setattr(engine_url, "ONE_TRY_S", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(EngineFailedError, match="did not answer within"),
    ):
        asyncio.run(reach(Server("127.0.0.1", listener.getsockname()[1]), "/health", 0.1))


def test_a_server_that_gets_ready_in_a_moment_is_loaded(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(engine_url, "loaded", lambda *given: seen.append(given[4].stage))
    with answering(503, 503, 200) as (port, asked):
        load_url(serving_plan(), Launch(tmp_path), Options(load=None, url=f"http://127.0.0.1:{port}"), lambda *_: None)
    assert seen == ["waiting for the server"]
    assert asked == ["/health"] * 3
