"""Plans through a cluster's own tool, with stand-ins for the tools on PATH that start what they are given on this machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from planner.cli.main import run
from planner.plan import load_plan
from planner.validate.engine_process import free_port
from tests.train_emit.plans import owned, tiny
from tests.validate.engine_helpers import FAKE, left_over, saved, serving_plan

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are found through /proc")

TRAIN = """
import json, os, sys, time
place = sys.argv[1]
os.makedirs(place, exist_ok=True)
with open(place + "/metrics.jsonl", "a") as file:
    for step in range(1, 1000):
        time.sleep(0.02)
        file.write(json.dumps({"event": "step", "step": step, "step_time_s": 0.5 if step < 3 else 0.25, "tokens_per_s": 1024.0, "peak_reserved_gib": 2.5}) + "\\n")
        file.flush()
"""
STATE = 'state="$STAND_IN/state"; '
JOB = 'setsid bash -c "$COMMAND" >"${LOG:-/dev/null}" 2>&1 & echo $! >"$STAND_IN/pid"; '
KILL = '[ -f "$STAND_IN/pid" ] && kill -- -"$(cat "$STAND_IN/pid")" 2>/dev/null; rm -f "$STAND_IN/pid"; exit 0'
UP = '[ -f "$STAND_IN/pid" ] && kill -0 "$(cat "$STAND_IN/pid")" 2>/dev/null'
TOOLS = {
    "sbatch": f'for w in "$@"; do case "$w" in --output=*) LOG="${{w#--output=}}";; esac; done; {JOB} echo "4711;cluster"',
    "squeue": f'{UP} && case "$*" in *"%T %N"*) echo "RUNNING node-[1-2]";; *) echo RUNNING;; esac; exit 0',
    "scontrol": "printf '127.0.0.1\\n127.0.0.1\\n'",
    "scancel": KILL,
    "sky": f'case "$1" in launch) {JOB} ;; status) {UP} && echo "127.0.0.1:$PORT_HERE" ;; down) {KILL} ;; esac',
    "ssh": 'cat "$OUT_HERE/metrics.jsonl" 2>/dev/null',
    "kubectl": f"""case "$1" in
apply) {JOB} ;;
get) case "$*" in *phase}}*) echo Running;; *) {UP} && echo pod-0 ;; esac ;;
port-forward) exec {sys.executable} -c '
import asyncio, os, sys
async def pipe(r, w):
    while data := await r.read(65536):
        w.write(data); await w.drain()
    w.close()
async def one(r, w):
    r2, w2 = await asyncio.open_connection("127.0.0.1", int(os.environ["PORT_HERE"]))
    await asyncio.gather(pipe(r, w2), pipe(r2, w))
async def main():
    await (await asyncio.start_server(one, "127.0.0.1", int(sys.argv[1].split(":")[0]))).serve_forever()
asyncio.run(main())' "$3" ;;
exec) cat "$OUT_HERE/metrics.jsonl" ;;
logs) echo "Model loading took 1.25 GiB memory and 3 seconds" ;;
delete) {KILL} ;;
esac""",
}


@pytest.fixture
def cluster(monkeypatch, tmp_path):
    """PATH with stand-ins; each call is noted in `calls`."""
    bin_dir, place = tmp_path / "bin", tmp_path / "stand-in"
    bin_dir.mkdir()
    place.mkdir()
    for name, text in TOOLS.items():
        (bin_dir / name).write_text(f'#!/bin/bash\necho "{name} $*" >>"$STAND_IN/calls"\n{text}\n')
        (bin_dir / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_dir}:{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(place))
    monkeypatch.setenv("OUT_HERE", str(tmp_path / "files/out"))
    (tmp_path / "train.py").write_text(TRAIN)
    shutil.copy(FAKE, tmp_path / "engine.py")
    yield place
    assert left_over(str(tmp_path)) == []


def files(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    for name in names:
        kind = {"apiVersion": "v1", "kind": "Deployment", "metadata": {"name": "serve-x"}}
        (folder / name).write_text(json.dumps(kind) if name == "kubernetes.yaml" else "x")
    return folder


def calls(cluster: Path) -> list[str]:
    return [line.split()[0] for line in (cluster / "calls").read_text().splitlines()]


SERVE = [
    ("slurm", "serve.slurm", "scancel"),
    ("skypilot", "skypilot.yaml", "sky"),
    ("kubernetes", "kubernetes.yaml", "kubectl"),
]


@pytest.mark.parametrize(("tool", "file", "last"), SERVE)
def test_serving(tool, file, last, cluster, monkeypatch, capsys, tmp_path):
    port = free_port()
    monkeypatch.setattr("planner.cli.validate_engine._places", lambda plan: ((0,), "/health", port))
    monkeypatch.setenv("PORT_HERE", str(port))
    monkeypatch.setenv("COMMAND", f"exec {sys.executable} {tmp_path / 'engine.py'} {port} ok 20 5")
    path = saved(serving_plan(), tmp_path)
    words = ["--through", tool, "--files", str(files(tmp_path, file)), "--requests", "20", "--json"]
    code = run(["validate", str(path), "--level", "engine", *words])
    out, err = capsys.readouterr()
    assert code == 0, err
    assert json.loads(out)["validation"]["measured"]["ttft_ms_p50"] >= 20
    assert load_plan(path).validation["requests"] == 20
    done = calls(cluster)
    assert done[0] in ("sbatch", "sky", "kubectl")
    assert last in done
    assert not (cluster / "pid").exists()


TRAINED = [("slurm", "train.slurm"), ("skypilot", "skypilot.yaml"), ("kubernetes", "kubernetes.yaml")]


@pytest.mark.parametrize(("tool", "file"), TRAINED)
def test_training(tool, file, cluster, monkeypatch, capsys, tmp_path):
    folder = files(tmp_path, file)
    out = folder / "validate-output" if tool == "slurm" else folder / "out"
    monkeypatch.setenv("COMMAND", f"exec {sys.executable} {tmp_path / 'train.py'} {out}")
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    words = ["--through", tool, "--files", str(folder), "--steps", "6", "--dataset", "/shared/text.txt", "--json"]
    code = run(["validate", str(path), "--level", "engine", *words])
    text, err = capsys.readouterr()
    assert code == 0, err
    measured = json.loads(text)["validation"]["measured"]
    assert measured["step_time_s"] == 0.25
    assert measured["peak_reserved_gib"] == 2.5
    assert measured["peak_memory_gib"] > 2.5  # with the context that torch does not see
    assert not (folder / "validate-output").exists()
    said = (cluster / "calls").read_text()
    assert {
        "slurm": "scancel 4711",
        "skypilot": "sky down -y planner-",
        "kubernetes": "kubectl delete -f kubernetes.yaml",
    }[tool] in said


def test_a_job_that_dies(cluster, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("COMMAND", "echo 'torch.OutOfMemoryError: CUDA out of memory'; exit 1")
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    words = ["--through", "slurm", "--files", str(files(tmp_path, "train.slurm")), "--dataset", "/x"]
    assert run(["validate", str(path), "--level", "engine", *words]) == 2
    err = capsys.readouterr().err
    assert "the submitted job ended by itself: the GPU ran out of memory" in err
    assert "  | torch.OutOfMemoryError: CUDA out of memory" in err


@pytest.mark.parametrize(("tool", "program"), [("slurm", "sbatch"), ("skypilot", "sky"), ("kubernetes", "kubectl")])
def test_without_the_tool_one_line_names_it(tool, program, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run(["validate", str(saved(serving_plan(), tmp_path)), "--level", "engine", "--through", tool]) == 2
    err = capsys.readouterr().err
    assert f"--through {tool} needs the program {program}" in err
    assert len(err.splitlines()) == 1


def test_several_machines_need_a_way(capsys, tmp_path):
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    assert run(["validate", str(path), "--level", "engine", "--cpu"]) == 2
    assert "Give --through slurm, skypilot, kubernetes or hostfile" in capsys.readouterr().err


def test_a_hostfile_is_asked_for(capsys, tmp_path):
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    words = ["--through", "hostfile", "--dataset", "/x", "--files", str(files(tmp_path, "launch.sh"))]
    assert run(["validate", str(path), "--level", "engine", *words]) == 2
    assert "there is no hostfile beside launch.sh" in capsys.readouterr().err


def test_a_hostfile_run_ends_clean(cluster, capsys, tmp_path):
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    folder = files(tmp_path, "launch.sh", "hostfile")
    (folder / "launch.sh").write_text(f'exec {sys.executable} {tmp_path / "train.py"} "$OUTPUT_DIR"\n')
    words = ["--through", "hostfile", "--dataset", "/x", "--files", str(folder), "--steps", "5"]
    assert run(["validate", str(path), "--level", "engine", *words]) == 0
    assert "step_time_s" in capsys.readouterr().out
    assert sorted(p.name for p in folder.iterdir()) == ["hostfile", "launch.sh"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_jobs_are_cancelled(number, cluster, monkeypatch, tmp_path):
    folder = files(tmp_path, "train.slurm")
    out = folder / "validate-output"
    path = saved(tiny("deepspeed", zero_stage=2, offers=(owned("rtx-4090", 1, 2),)), tmp_path)
    words = ["--through", "slurm", "--files", str(folder), "--steps", "900", "--dataset", "/shared/text.txt"]
    env = os.environ | {
        "COMMAND": f"exec {sys.executable} {tmp_path / 'train.py'} {out}",
        "PYTHONPATH": str(Path.cwd()),
    }
    command = [sys.executable, "-m", "planner", "validate", str(path), "--level", "engine", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    until = time.monotonic() + 60
    while not (out / "metrics.jsonl").exists() and time.monotonic() < until:
        time.sleep(0.1)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert "scancel 4711" in (cluster / "calls").read_text()
    assert sorted(p.name for p in folder.iterdir()) == ["train.slurm"]
