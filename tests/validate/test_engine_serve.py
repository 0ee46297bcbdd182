"""`validate --level engine` on a stand-in server: the client measures its pace, and every bad day ends clean."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.plan import load_plan
from planner.validate import engine_serve
from planner.validate.engine_process import Group
from tests.validate.engine_helpers import FAKE, fake_files, left_over, saved, serving_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """After each test no process of the stand-in, no temporary folder and no open port of the run is left."""
    place = tmp_path / "tmp"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield
    assert left_over(str(tmp_path / "files")) == []
    assert [p.name for p in place.iterdir()] == []


def validate(made, tmp_path, mode, *words, ttft=50, tpot=10):
    files = fake_files(tmp_path / "files", mode, ttft, tpot)
    path = saved(made, tmp_path)
    return run(["validate", str(path), "--level", "engine", "--files", str(files), "--cpu", *words]), path


def test_the_client_measures_what_the_server_does(capsys, tmp_path):
    code, path = validate(serving_plan(), tmp_path, "ok", "--requests", "60", "--json", ttft=100, tpot=20)
    out, err = capsys.readouterr()
    assert code == 0, err
    measured = json.loads(out)["validation"]["measured"]
    assert 100 <= measured["ttft_ms_p50"] < 150
    assert 20 <= measured["tpot_ms_mean"] < 30
    assert 240 <= measured["e2e_ms_mean"] < 400
    assert measured["e2e_ms_mean"] == pytest.approx(measured["ttft_ms_mean"] + 7 * measured["tpot_ms_mean"], rel=0.02)
    assert (measured["input_tokens_mean"], measured["output_tokens_mean"]) == (32, 8)
    assert measured["ttft_ms"] == measured["ttft_ms_p95"]
    assert measured["throughput_tokens_per_s"] == pytest.approx(320, rel=0.35)
    assert (measured["weights_gib"], measured["kv_cache_tokens"]) == (1.5, 12345)
    back = load_plan(path).validation
    assert back["level"] == "engine"
    assert back["measured"] == measured
    assert back["requests"] == 60
    assert {k: v["verdict"] for k, v in back["limits"].items()} == {
        "TTFT, 95th percentile": "held",
        "TPOT, mean": "held",
    }
    assert path.read_text().startswith("# head\n")


def test_a_broken_limit_is_said_and_the_exit_code_is_3(capsys, tmp_path):
    limits = {"ttft_s": 0.02, "tpot_s": 0.005, "e2e_s": 0.001}
    code, path = validate(serving_plan(limits), tmp_path, "ok", "--requests", "30", ttft=100)
    out, _ = capsys.readouterr()
    assert code == 3
    assert out.count("did not hold") == 3
    assert "30 of 30 requests are over it" in out
    assert "predicted against measured" in out
    assert load_plan(path).validation["error_percent"] == {}  # a rehearsal says nothing about the planned GPU


def test_too_few_requests_cannot_say(capsys, tmp_path):
    code, _ = validate(serving_plan(), tmp_path, "ok", "--requests", "5")
    out, _ = capsys.readouterr()
    assert code == 0
    assert "cannot say    (0 of 5 requests are over it; more requests are needed for a 95th percentile)" in out


def test_users_in_a_closed_loop(capsys, tmp_path):
    made = serving_plan(rate_per_s=None, concurrency=4)
    code, _ = validate(made, tmp_path, "ok", "--requests", "24", "--json", ttft=50, tpot=5)
    measured = json.loads(capsys.readouterr().out)["validation"]["measured"]
    assert code == 0
    e2e_s = measured["e2e_ms_mean"] / 1e3
    assert measured["throughput_tokens_per_s"] == pytest.approx(4 * 8 / e2e_s, rel=0.2)


@pytest.mark.parametrize("mode", ["noids", "nostream"])
def test_servers_that_take_less(mode, capsys, tmp_path):
    code, _ = validate(serving_plan(), tmp_path, mode, "--requests", "50", "--json")
    tree = json.loads(capsys.readouterr().out)
    assert code == 0
    measured = tree["validation"]["measured"]
    assert measured["input_tokens_mean"] == pytest.approx(32, abs=1)
    assert ("ttft_ms" in measured) == (mode == "noids")
    if mode == "nostream":
        assert tree["limits"][0]["why"] == "the server does not stream its answers"


def test_lengths_from_a_trace(capsys, tmp_path):
    (tmp_path / "trace.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n0,10,4\n1,20,6\n")
    code, _ = validate(
        serving_plan(), tmp_path, "ok", "--requests", "10", "--trace", str(tmp_path / "trace.csv"), "--json"
    )
    measured = json.loads(capsys.readouterr().out)["validation"]["measured"]
    assert code == 0
    assert (measured["input_tokens_mean"], measured["output_tokens_mean"]) == (15, 5)


def test_out_of_memory_at_start(capsys, tmp_path):
    code, path = validate(serving_plan(), tmp_path, "oom")
    err = capsys.readouterr().err
    assert code == 2
    assert "the GPU ran out of memory; fitted before that: weights 14.99 GiB" in err
    assert "  | torch.OutOfMemoryError: CUDA out of memory." in err
    assert load_plan(path).validation is None


@pytest.mark.parametrize("mode", ["hang", "slow"])
def test_not_healthy_in_time(mode, capsys, tmp_path):
    code, _ = validate(serving_plan(), tmp_path, mode, "--timeout", "900ms")
    err = capsys.readouterr().err
    assert code == 2
    assert "/health did not answer within 0.9 s" in err
    assert "raise --timeout" in err


def test_it_dies_under_load(capsys, tmp_path):
    code, _ = validate(serving_plan(rate_per_s=5.0), tmp_path, "die", "--requests", "200")
    err = capsys.readouterr().err
    assert code == 2
    assert "the engine ended with exit code 9" in err


@pytest.mark.parametrize("mode", ["stubborn", "child"])
def test_what_does_not_want_to_end(mode, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Group.stop, "__defaults__", (1.0, False))
    code, _ = validate(serving_plan(), tmp_path, mode, "--requests", "5")
    assert code == 0, capsys.readouterr().err


def test_a_taken_port_is_named(capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _ = validate(serving_plan(), tmp_path, "ok", "--port", str(port))
    assert code == 2
    assert f"port {port} is taken" in capsys.readouterr().err


def test_a_running_server_is_loaded_and_left_alone(capsys, tmp_path):
    path, port = saved(serving_plan(), tmp_path), engine_serve.free_port()
    server = subprocess.Popen([sys.executable, str(FAKE), str(port), "ok", "20", "5"], stdout=subprocess.DEVNULL)
    try:
        words = ["--url", f"http://127.0.0.1:{port}/v1", "--requests", "10", "--json"]
        assert run(["validate", str(path), "--level", "engine", *words]) == 0
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()
    measured = json.loads(capsys.readouterr().out)["validation"]["measured"]
    assert "weights_gib" not in measured
    assert measured["ttft_ms_p50"] >= 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("mode", ["hang", "ok"])
def test_interrupted(mode, number, tmp_path):
    """Ctrl-C and SIGTERM, while it starts and under load: exit code 130 and nothing left."""
    files, path = fake_files(tmp_path / "files", mode), saved(serving_plan(), tmp_path)
    before = path.read_text()
    words = ["validate", str(path), "--level", "engine", "--files", str(files), "--cpu", "--duration", "5m"]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner", *words], stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )  # fmt: skip
    until = time.monotonic() + 30
    while not left_over(str(files / "engine.py")) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.7)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "interrupted" in err
    assert path.read_text() == before


@pytest.mark.parametrize("mode", ["ok", "child", "stubborn"])
def test_planner_is_killed(mode, tmp_path):
    """SIGKILL to planner: what it started ends too, a worker in a session of its own and one that ignores SIGTERM as well."""
    files, path = fake_files(tmp_path / "files", mode), saved(serving_plan(), tmp_path)
    words = [
        "validate",
        str(path),
        "--level",
        "engine",
        "--files",
        str(files),
        "--cpu",
        "--duration",
        "5m",
        "--bench",
        "own",
    ]
    process = subprocess.Popen([sys.executable, "-m", "planner", *words], stderr=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(Path.cwd())})  # fmt: skip
    marker, until = str(files / "engine.py"), time.monotonic() + 60
    while len(left_over(marker)) < (2 if mode == "child" else 1) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    assert left_over(marker)
    process.kill()
    process.wait()
    until = time.monotonic() + 60
    while (left_over(marker) or list((tmp_path / "tmp").iterdir())) and time.monotonic() < until:
        time.sleep(0.1)
    assert left_over(marker) == []


def test_the_disk_is_full(monkeypatch, capsys, tmp_path):
    """The engine's own message is understood; a plan that cannot be written is said before anything is measured."""
    files, path = tmp_path / "files", saved(serving_plan(), tmp_path)
    fake_files(files, "ok")
    (files / "serve.sh").write_text("echo 'OSError: [Errno 28] No space left on device' >&2; exit 1\n")
    assert run(["validate", str(path), "--level", "engine", "--files", str(files), "--cpu"]) == 2
    assert "the disk is full" in capsys.readouterr().err
    out = tmp_path / "no/such/folder/plan.yaml"
    assert run(["validate", str(path), "--level", "engine", "--files", str(files), "--cpu", "--out", str(out)]) == 2
    assert "cannot write" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests", "x"], "--requests"),
        (["--port", "80"], "--port 80 is not between"),
        (["--env", "NOPE"], "is not NAME=VALUE"),
        (["--through", "pbs"], "unknown way to submit"),
        (["--trace", "/nonexistent"], "cannot read the trace"),
        (["--dataset", "x"], "--dataset is for training plans"),
        (["--url", "ftp://x"], "is no URL"),
        (["--files", "/nonexistent"], "is no folder"),
        (["--bench", "ab"], "unknown bench"),
    ],
)
def test_bad_input_is_one_line(words, said, capsys, tmp_path):
    path = saved(serving_plan(), tmp_path)
    assert run(["validate", str(path), "--level", "engine", *words]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1


def test_options_of_another_level_are_refused(capsys, tmp_path):
    assert run(["validate", str(saved(serving_plan(), tmp_path)), "--requests", "5"]) == 2
    assert "--requests is for --level engine" in capsys.readouterr().err


def test_no_gpu_here(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("planner.validate.engine_run.local_gpus", list)
    files = fake_files(tmp_path / "files", "ok")
    path = saved(serving_plan(), tmp_path)
    assert run(["validate", str(path), "--level", "engine", "--files", str(files)]) == 2
    assert "the plan needs 1 GPU here and 0 answered" in capsys.readouterr().err


def test_a_faulty_driver(monkeypatch, capsys, tmp_path):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "nvidia-smi").write_text(
        "#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n"
    )
    (bin_dir / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    path = saved(serving_plan(), tmp_path)
    assert run(["validate", str(path), "--level", "engine", "--files", str(fake_files(tmp_path / "files", "ok"))]) == 2
    assert "Driver/library version mismatch" in capsys.readouterr().err


def test_a_missing_engine_names_what_to_install(capsys, tmp_path):
    files, path = fake_files(tmp_path / "files", "ok"), saved(serving_plan(), tmp_path)
    (files / "serve.sh").write_text("exec vllm serve x\n")
    words = ["--files", str(files), "--cpu", "--env", "PATH=/usr/bin:/bin"]
    assert run(["validate", str(path), "--level", "engine", *words]) == 2
    err = capsys.readouterr().err
    assert "the program vllm is not installed or not on PATH" in err
    assert "python3 -m pip install vllm==" in err


def test_memory_of_the_gpus(monkeypatch, capsys, tmp_path):
    """nvidia-smi before and after: what the fullest GPU took."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    used = f"[ -e {tmp_path}/up ] && echo 61440 || echo 1024; touch {tmp_path}/up"
    text = f"case $1 in *name) echo 'NVIDIA GeForce RTX 3090';; *) {used};; esac"
    (bin_dir / "nvidia-smi").write_text(f"#!/bin/sh\n{text}\n")
    (bin_dir / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    path = saved(serving_plan(), tmp_path)
    words = ["--files", str(fake_files(tmp_path / "files", "ok")), "--requests", "10", "--json"]
    assert run(["validate", str(path), "--level", "engine", *words]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["validation"]["measured"]["peak_memory_gib"] == 59
    assert tree["validation"]["hardware"] == "as planned"
    assert tree["validation"]["error_percent"]["weights_gib"] == pytest.approx(900)
