"""What calibrate writes is a catalog that plans can be made on; nothing is left half-written."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from planner.cli.main import run
from planner.errors import CatalogError, InputError, InvalidValueError
from planner.estimator.time.collectives import all_gather_s, all_reduce_s, fabric, reduce_scatter_s
from planner.estimator.time.kernels import constants, device_constants
from planner.estimator.time.surfaces import axes, surface_of, table_of
from planner.hardware.catalog import load_catalog
from planner.hardware.records import KernelFile
from planner.validate.calibrate import files
from planner.validate.calibrate import run as measuring
from planner.validate.calibrate.grid import Point, coarse_first, filled
from planner.validate.calibrate.group import SIZES, link_of
from planner.validate.calibrate.machine import Machine, find_machine
from tests.calibrate.cpu import CONSTANTS, folder, machine, measured


def test_the_folder_is_a_catalog(own):
    catalog = load_catalog([own])
    gpu = catalog.gpus["this-cpu"]
    assert (gpu.vendor, gpu.cpu_threads, gpu.peak_tflops["bf16"]) == ("cpu", 1, 0.2)
    assert surface_of(gpu).surface is gpu.kernels
    assert not surface_of(gpu).borrowed
    assert "measured by planner" in gpu.source
    assert "torch 2.13" in gpu.source
    for kernel in set(axes()) - {"gemm_powers"}:  # training takes the products as they were measured
        assert table_of(gpu.kernels, kernel, "bf16").shape == tuple(len(a) for a in axes()[kernel])
    assert np.allclose(table_of(gpu.kernels, "gemm", "bf16"), -1.0)


@pytest.mark.parametrize("known", [True, False])
def test_a_measured_gpu_is_a_catalog_entry(tmp_path, known):
    """With the data sheet's peaks where the card is known, with measured ones where it is not."""
    gpu = load_catalog().gpus["h200"] if known else None
    card = Machine("cuda", 1, "NVIDIA H200", None, 150e9, 139 * 2**30, gpu, "torch 2.13, CUDA 12.8", "nvidia", 9.0)
    figures = measured(1)
    files.write(tmp_path / "mine", files.catalog_files("this-card", card, figures, "h200" if known else "a100"))
    found = load_catalog([tmp_path / "mine"]).gpus["this-card"]
    assert (found.vendor, found.compute_capability, found.cpu_threads) == ("nvidia", 9.0, None)
    assert found.peak_tflops["bf16"] == (gpu.peak_tflops["bf16"] if gpu else 0.2)
    assert not surface_of(found).borrowed
    assert (
        run(
            [
                "estimate",
                "--model",
                "8b",
                "--catalog",
                str(tmp_path / "mine"),
                "--on",
                "1xthis-card",
                "--concurrency",
                "4",
            ]
        )
        == 0
    )


def test_measured_constants_take_the_place_of_packaged_ones(own):
    gpu = load_catalog([own]).gpus["this-cpu"]
    here = device_constants(gpu)
    assert here["streaming_floor_us"] == CONSTANTS["streaming_floor_us"]
    assert here["expert_imbalance"] == constants()["expert_imbalance"]
    h100 = load_catalog().gpus["h100-sxm"]
    assert device_constants(h100) == constants()


def test_a_link_gives_back_the_times_it_was_made_from(own):
    catalog = load_catalog([own])
    group, rows = fabric([catalog.links["this-cpu-link"]], [2]), measured().collectives
    size = np.array([[SIZES[-1]]], dtype=float)
    for name, formula in (
        ("all_gather", all_gather_s),
        ("all_reduce", all_reduce_s),
        ("reduce_scatter", reduce_scatter_s),
    ):
        assert float(formula(group, size)[0, 0]) == pytest.approx(dict(rows[name])[float(SIZES[-1])], rel=0.02), name


def test_link_of_is_latency_and_rate():
    found = link_of(
        {k: [(float(s), 1e-4 + s / 2 / 1e9) for s in SIZES] for k in ("all_gather", "all_reduce", "reduce_scatter")}, 2
    )
    assert found["latency_us"] == pytest.approx(100, rel=0.05)
    assert found["busbw_gb_per_s"] == pytest.approx(1.0, rel=0.02)
    assert found["all_reduce_factor"] == pytest.approx(0.5, rel=0.01)


def test_points_not_measured_come_from_the_nearest():
    table = filled("prefill_attention", [Point((0, 0), 0.25), Point((6, 7), 1.0)])
    assert table[0, 0] == pytest.approx(0.25)
    assert table[6, 7] == pytest.approx(1.0)
    assert table[1, 0] < table[3, 4] < table[6, 6]
    places = [at for at, _ in coarse_first("gemm")]
    assert len(places) == len(set(places)) == np.prod([len(a) for a in axes()["gemm"]])


@pytest.mark.parametrize("on", ["1xthis-cpu", "2xthis-cpu"])
def test_serving_is_planned_on_it(own, model, on, capsys):
    code = run(
        [
            "solve",
            "--catalog",
            str(own),
            "--on",
            on,
            "--model",
            str(model),
            "--rate",
            "0.5",
            "--input-tokens",
            "128",
            "--output-tokens",
            "32",
            "--json",
        ]
    )
    plan = json.loads(capsys.readouterr().out)
    assert (code, plan["deployment"]["engine"]) == (0, "transformers")
    assert plan["deployment"]["offers"][0]["cpu_threads"] == 1
    assert not any("borrowed" in w or "were not measured" in w for w in plan["warnings"])


@pytest.mark.parametrize(
    ("stack", "stage"), [("deepspeed", 1), ("deepspeed", 3), ("fsdp2", 3), ("fsdp2", 2), ("ddp", 0)]
)
def test_training_is_planned_on_it(own, model, stack, stage, capsys):
    code = run(["solve", "--task", "train", "--catalog", str(own), "--on", "2xthis-cpu", "--model", str(model), "--tokens", "100k", "--seq-len", "256",
                "--global-batch", "8seq", "--framework", stack, "--zero-stage", str(stage), "--json"])  # fmt: skip
    plan = json.loads(capsys.readouterr().out)
    assert code == 0
    assert plan["deployment"]["train"]["offload"] == "none"
    assert 0 < plan["memory"]["total_gib"] < 8


@pytest.mark.parametrize("engine", ["vllm", "sglang", "deepspeed_inference"])
def test_engines_without_a_cpu_build_are_refused(own, model, engine, capsys):
    code = run(["solve", "--catalog", str(own), "--on", "1xthis-cpu", "--model", str(model), "--engine", engine])
    text = capsys.readouterr()
    assert code == 3
    assert f"{engine} does not run on this-cpu: its vendor is cpu" in text.out + text.err


def test_gpus_answer_as_before_beside_it(own, capsys):
    answers = []
    for more in ([], ["--catalog", str(own)]):
        assert run(["estimate", "--model", "8b", "--on", "1xl40s", "--concurrency", "4", "--json", *more]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1]


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("kernels/nobody.csv", "", "nobody"),
        ("kernels/this-cpu.txt.yaml", "", "CSV"),
        ("gpus.yaml", "x: {vendor: cpu, architecture: cpu, memory_gb: 8, usable_gib: 6, bandwidth_gb_per_s: 9, peak_tflops: {bf16: 1}, default_link: none}", "cpu_threads"),
        ("gpus.yaml", "x: {vendor: cpu, cpu_threads: 1, architecture: cpu, memory_gb: 8, usable_gib: 6, bandwidth_gb_per_s: 9, peak_tflops: {bf16: 1}, default_link: none, measured: {a: -1}}", "measured"),
    ],
)  # fmt: skip
def test_faults_of_a_folder_name_the_file(tmp_path, name, text, words):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(CatalogError, match=words):
        load_catalog([tmp_path])


@pytest.mark.parametrize(
    ("text", "words"),
    [("gemm,bf16,256,256,1,2\n", "values"), ("gem,bf16,1\n", "no row"), ("gemm,bf16,256,256,a\n", "no number")],
)
def test_faults_of_a_surface_are_bad_input(own, tmp_path, text, words):
    mine = folder(tmp_path / "mine")
    (mine / "kernels/this-cpu.csv").write_text(text)
    with pytest.raises(CatalogError, match=words):
        table_of(load_catalog([mine]).gpus["this-cpu"].kernels, "gemm", "bf16")


def test_a_second_measurement_replaces_the_first_as_a_whole(tmp_path):
    out = folder(tmp_path / "mine", "first")
    folder(out, "second")
    assert sorted(p.name for p in (out / "kernels").iterdir()) == ["second.csv"]
    assert [p.name for p in tmp_path.iterdir()] == ["mine"]


def test_another_folder_is_not_touched(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InvalidValueError, match="not empty"):
        files.check_target(tmp_path)


@pytest.mark.parametrize("name", ["file/x", "file/x/y", "file"])
def test_a_place_that_cannot_be_written_is_said_before_measuring(name, tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(measuring, "find_machine", lambda *_: pytest.fail("it began to measure"))
    assert run(["calibrate", "--out", str(tmp_path / name)]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_proc_takes_no_folder(tmp_path):
    with pytest.raises(InvalidValueError, match="cannot write '/proc/x'"):
        files.check_target(Path("/proc/x"))
    files.check_target(tmp_path / "a/b")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "replace", full)
    with pytest.raises(InvalidValueError, match="No space left"):
        folder(tmp_path / "mine")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "text", "words"),
    [
        (-9, "", "out of memory"),
        (1, "torch.OutOfMemoryError: CUDA out of memory.", "out of memory"),
        (1, "OSError: [Errno 28] No space left on device", "disk"),
        (1, "The NVIDIA driver on your system is too old for CUDA", "driver"),
        (1, "ValueError: x", "failed"),
    ],
)
def test_a_worker_that_dies_is_told_in_one_line(code, text, words):
    error = measuring._failure(code, text)
    assert words in str(error)
    assert "\n" not in str(error)


def test_no_gpu_and_too_many_processes_are_bad_input(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidValueError, match="sees no GPU"):
        find_machine("cuda", None)
    with pytest.raises(InvalidValueError, match="out of range"):
        find_machine("cpu", 10_000)


@pytest.mark.parametrize(
    "words",
    [["--device", "tpu"], ["--seconds", "0"], ["--seconds", "nan"], ["--name", "My CPU"], ["--processes", "0"]],
)
def test_options_are_checked_before_anything_runs(tmp_path, words, capsys):
    pytest.importorskip("torch")
    assert run(["calibrate", "--out", str(tmp_path / "x"), *words]) == 2
    assert not (tmp_path / "x").exists()


def test_an_interrupt_stops_the_workers_and_writes_nothing(tmp_path, monkeypatch):
    started = []
    popen = measuring.subprocess.Popen

    def sleeper(command, **kwargs):
        started.append(popen(["sleep", "60"], **{**kwargs, "env": os.environ}))
        return started[-1]

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(measuring.subprocess, "Popen", sleeper)
    monkeypatch.setattr(measuring, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        measuring.measure(machine(), 1.0, lambda *_: None)
    assert [process.poll() is not None for process in started] == [True, True]


def workers(place):
    """Pids of workers whose settings lie there."""
    found = subprocess.run(["ps", "-ewwo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in found if f"calibrate.worker {place}" in line]


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found through ps")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_130_and_nothing_left(number, tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    place = tmp_path / "tmp"
    place.mkdir()
    words = ["calibrate", "--out", str(tmp_path / "here"), "--device", "cpu", "--processes", "1", "--seconds", "300"]
    env = os.environ | {"TMPDIR": str(place), "PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-m", "planner", *words], stderr=subprocess.PIPE, text=True, env=env)
    until = time.monotonic() + 60
    while not workers(place) and time.monotonic() < until:
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    left = workers(place)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert (process.returncode, left, list(place.iterdir())) == (130, [], []), err
    assert "interrupted" in err
    assert not (tmp_path / "here").exists()


def test_workers_that_hang_are_stopped(monkeypatch):
    process = measuring.subprocess.Popen(["sleep", "60"], text=True)
    try:
        with pytest.raises(InputError, match="in time"):
            measuring._wait([process], [], 0.0)
    finally:
        process.kill()
        process.wait()


def test_this_machine_is_measured_for_real(tmp_path, capsys):
    """Two processes, a second or so of measuring; the surface and the constants are finite and the plan works."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    out = tmp_path / "here"
    assert (
        run(
            [
                "calibrate",
                "--out",
                str(out),
                "--device",
                "cpu",
                "--processes",
                "1" if (os.cpu_count() or 1) < 2 else "2",
                "--seconds",
                "2",
                "--json",
            ]
        )
        == 0
    )
    tree = json.loads(capsys.readouterr().out)
    gpu = load_catalog([out]).gpus["this-cpu"]
    assert tree["points"]["gemm"] >= 1
    assert all(np.isfinite(v) and v >= 0 for v in gpu.measured.values())
    assert gpu.measured["attention_backward"] >= 1
    assert table_of(gpu.kernels, "decode_attention", "bf16").size
    assert [p.name for p in tmp_path.iterdir()] == ["here"]


def test_a_file_of_another_grid_is_to_be_made_again():
    old = KernelFile("kernels/old.csv", "gemm,bf16,256,256" + ",0.5" * 11 + "\n")
    with pytest.raises(CatalogError, match=r"has 11 values.*this version needs 832.*planner calibrate"):
        table_of(old, "gemm", "bf16")
