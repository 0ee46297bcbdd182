"""The accuracy harness and the replay of memory rows."""

import csv
import json

import pytest

from planner.errors import InvalidValueError
from planner.validate import accuracy
from planner.validate.accuracy_memory import derived, replay
from planner.validate.prediction import Prediction
from tests.memory.facts import CONTEXT, LOGS

COLUMNS = (
    "id",
    "task",
    "model",
    "quant",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "max_model_len",
    "batch",
    "engine",
    "engine_version",
    "gpu_mem_util",
    "outcome",
    "metric",
    "value",
    "source",
    "evidence",
    "note",
)
NOTE = "dtype=bfloat16 kv_cache_dtype=auto max_num_batched_tokens=8192 max_num_seqs=1024; rank-0 values"


def row(metric="weights_gib_per_gpu", value="14.99", **fields):
    base = {
        "id": f"A/{metric}",
        "task": "infer",
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "quant": "bfloat16",
        "gpu": "H100-80GB (79.19 GiB)",
        "n_gpus": "1",
        "tp": "1",
        "pp": "1",
        "max_model_len": "8192",
        "batch": "1024",
        "engine": "vllm",
        "engine_version": "0.19.0",
        "gpu_mem_util": "0.95",
        "outcome": "fits",
        "metric": metric,
        "value": value,
        "source": "s",
        "evidence": "log file",
        "note": NOTE,
    }
    return {**base, **fields}


def log_rows():
    words = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
    found = []
    for n, (name, method, tp, pp, weights, activation, pool, tokens) in enumerate(LOGS):
        fields = {
            "model": name,
            "quant": words.get(method, "compressed-tensors"),
            "tp": str(tp),
            "pp": str(pp),
            "n_gpus": str(tp * pp),
        }
        if method == "fp8" and not name.startswith("RedHat"):
            fields["quant"] = "fp8 (runtime)"
        fields["max_model_len"] = str(CONTEXT.get(name, 8192))
        values = {"weights_gib_per_gpu": weights, "activation_gib": activation, "kv_gib": pool, "kv_tokens": tokens}
        found += [row(m, str(v), id=f"L{n}/{m}", **fields) for m, v in values.items()]
    return found


def test_logs_are_within_the_bars():
    rows = log_rows()
    found = {s.metric: s for s in accuracy.scores("memory", rows, replay(rows)) if s.group == "all"}
    assert all(s.coverage == 1 for s in found.values())
    assert found["weights_gib_per_gpu"].median_ape < 1
    assert found["weights_gib_per_gpu"].p95_ape < 3
    assert found["kv_tokens"].median_ape < 2
    assert found["activation_gib"].median_ape < 5
    for metric, group, predicted, measured in derived(rows, replay(rows)):
        assert metric == "kv_bytes_per_token"
        assert predicted == pytest.approx(measured, rel=0.005 if "dense" in group else 0.03)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"engine": "llama.cpp"}, "engine llama.cpp is not modelled"),
        ({"model": "nobody/knows"}, "unknown model"),
        ({"quant": "exl2"}, "quantisation 'exl2' is not modelled"),
        ({"tp": ""}, "tp is not stated"),
        ({"tp": "zero"}, "is not a count"),
        ({"metric": "outcome"}, "is not a memory figure"),
        ({"metric": "kv_gib", "gpu": ""}, "GPU is not stated"),
        ({"gpu_mem_util": "90%"}, "is not a fraction"),
        ({"model": ""}, "no usable model name"),
    ],
)
def test_every_row_without_prediction_has_its_reason(fields, reason):
    (found,) = replay([row(**fields)])
    assert found.predicted is None
    assert reason in found.skipped


def test_weights_need_no_gpu():
    (found,) = replay([row(gpu="")])
    assert found.predicted == pytest.approx(14.99, rel=0.001)
    assert found.low < found.predicted < found.high
    assert found.skipped == ""


def test_data_parallel_rows_spread_experts_and_copy_attention():
    def moe(**fields):
        (found,) = replay([row(model="Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", quant="fp8", **fields)])
        return found.predicted

    assert moe(n_gpus="8") > moe(n_gpus="8", tp="8")
    assert replay(
        [
            row(
                "kv_gib_needed",
                "62",
                model="Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
                quant="fp8",
                n_gpus="8",
                max_model_len="262144",
            )
        ]
    )[0].predicted == pytest.approx(62.0, rel=1e-3)  # vllm-project/recipes#12


def write(path, rows):
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_the_output_holds_every_row_with_its_own_columns(tmp_path):
    rows = [row(), row("kv_gib", "58.11"), row("outcome", "oom")]
    found = accuracy.run("memory", write(tmp_path / "in.csv", rows), tmp_path / "out")
    scores, written = found.scores, found.written
    with (tmp_path / "out" / "memory.csv").open() as stream:
        back = list(csv.DictReader(stream))
    assert [{c: r[c] for c in COLUMNS} for r in back] == rows
    assert list(back[0]) == [*COLUMNS, "predicted", "low", "high", "error_percent", "skipped", "assumed"]
    assert float(back[0]["error_percent"]) == pytest.approx((float(back[0]["predicted"]) / 14.99 - 1) * 100, abs=1e-3)
    assert back[2]["predicted"] == ""
    assert back[2]["skipped"]
    assert accuracy.reasons(written) == [("metric outcome is not a memory figure this replay predicts", 1)]
    assert {s.metric for s in scores} == {"weights_gib_per_gpu", "kv_gib", "outcome"}


def test_scores():
    rows = [row(value=v) for v in ("10", "20", "0", "word")]
    found = accuracy.scores(
        "memory", rows, [Prediction(11, 9, 12), Prediction(18, 17, 19), Prediction(5, 0, 10), Prediction(1, 0, 2)]
    )
    total = next(s for s in found if s.group == "all")
    assert (total.rows, total.predicted, total.coverage) == (4, 4, 1.0)
    assert total.median_ape == total.mean_ape == pytest.approx(10)
    assert total.bias == pytest.approx(0)
    assert total.inside == pytest.approx(2 / 3)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"metric,value\n1\n", b"\xff\xfe\x00bad", b"metric,value\n"])
def test_files_that_are_no_measurements(tmp_path, content):
    path = tmp_path / "in.csv"
    path.write_bytes(content)
    with pytest.raises(InvalidValueError) as caught:
        accuracy.run("memory", path, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_missing_files_and_tasks(tmp_path):
    with pytest.raises(InvalidValueError, match="cannot be read"):
        accuracy.run("memory", tmp_path / "none.csv", tmp_path)


def test_the_command(tmp_path, capsys):
    from planner.cli.accuracy import accuracy as command

    path = write(tmp_path / "in.csv", log_rows())
    command(memory=path, out=tmp_path / "out")
    text = capsys.readouterr().out
    assert "weights_gib_per_gpu" in text
    assert "kv_bytes_per_token" in text
    command(memory=path, out=tmp_path / "out", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["memory"]["scores"][0]["coverage"] == 1
    with pytest.raises(InvalidValueError, match="nothing to compare"):
        command()
