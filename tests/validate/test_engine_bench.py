"""Load tools of others: command lines, result files of real runs, stand-ins for the programs, and every bad day.

data/bench_*: vllm 0.32.0, sglang 0.5.23, aiperf 0.13.0 and guidellm 0.8.1 against the emitted transformers server on a CPU (50 requests of
64 + 16 tokens at 4/s), and (_failing) against a stand-in that refuses every fourth request. Texts and settings are cut out of them.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.cli import validate_engine
from planner.cli.main import run
from planner.engines.records import engine as engine_named
from planner.plan import load_plan
from planner.validate import engine_bench
from planner.validate.engine_bench import AUTO, OWN, choose, requests_of
from planner.validate.engine_benches import BENCHES, Asked
from planner.validate.engine_http import Server
from planner.validate.engine_load import Load
from planner.validate.engine_run import Options
from planner.validate.engine_stats import measured_of
from tests.validate.engine_helpers import fake_files, saved, serving_plan

DATA = Path(__file__).with_name("data")
FILES = {"vllm": "bench_vllm.json", "sglang": "bench_sglang.jsonl", "aiperf": "bench_aiperf.jsonl", "guidellm": "bench_guidellm.json"}  # fmt: skip
REFUSED = {"vllm": "Internal Server Error", "sglang": "no luck", "aiperf": "500 Internal Server Error", "guidellm": "500 Internal Server Error"}  # fmt: skip
SERVER = Server("127.0.0.1", 8000)
STAND_IN = """#!{python}
import json, os, sys
words = sys.argv[1:]
if words[:1] == ["-c"]:
    sys.exit(0)  # the package is there
json.dump([words, os.environ.get("OPENAI_API_KEY")], open({calls!r}, "w"))
print("a line before the last", "the last line", sep="\\n", flush=True)
folder = next(w.split("path=")[-1] for i, w in enumerate(words) if "path=" in w or words[i - 1] in ("--result-dir", "--artifact-dir", "--output-file"))
folder = folder.rsplit("/", 1)[0] if "result" in folder.rsplit("/", 1)[1] else folder
if {result!r}:
    open(folder + "/" + {name!r}, "w").write(open({result!r}).read())
sys.exit({code})
"""


def read(tool: str, requests: int = 50, failing: bool = False):
    name = FILES[tool].replace(".", "_failing.") if failing else FILES[tool]
    return BENCHES[tool].read((DATA / name).read_text(), requests)


def theirs(tool: str) -> dict[str, float]:
    """What the tool itself says of the run: means and percentiles in ms."""
    if tool in ("vllm", "sglang"):
        tree, e2e = json.loads((DATA / FILES[tool]).read_text()), {"vllm": "e2el", "sglang": "e2e_latency"}[tool]
        names = {"ttft": "ttft", "tpot": "tpot", "e2e": e2e}
        found = {f"{ours}_ms_{s}": tree[f"{s}_{name}_ms"] for ours, name in names.items() for s in ("mean", "p95", "p99")}  # fmt: skip
        return found | {"throughput": tree["output_throughput"]}
    if tool == "aiperf":
        tree = json.loads((DATA / "bench_aiperf_summary.json").read_text())
        names = {"ttft": "time_to_first_token", "tpot": "inter_token_latency", "e2e": "request_latency"}
        return {f"{o}_ms_{s}": tree[n][k] for o, n in names.items() for s, k in (("mean", "avg"), ("p95", "p95"), ("p99", "p99"))}  # fmt: skip
    tree = json.loads((DATA / FILES[tool]).read_text())["benchmarks"][0]["metrics"]
    ttft, e2e = (tree[n]["successful"] for n in ("time_to_first_token_ms", "request_latency"))
    tpot = tree["inter_token_latency_ms"]["successful"]["mean"]
    return {"ttft_ms_mean": ttft["mean"], "e2e_ms_mean": 1e3 * e2e["mean"], "tpot_ms_mean": tpot}


@pytest.mark.parametrize("tool", FILES)
def test_a_real_result_gives_what_the_tool_says_itself(tool):
    samples, alone = read(tool)
    found = measured_of(samples)
    table = found.table() | alone
    assert (found.answered, found.failed) == (50, 0)
    assert table["output_tokens_mean"] == 16
    assert table["input_tokens_mean"] == pytest.approx(64, abs=1)
    close = 0.02 if tool == "sglang" else 0.005  # it does not write when the stream ended, only its tokens
    for name, value in theirs(tool).items():
        if name != "throughput":
            assert table[name] == pytest.approx(value, rel=close), name
    assert table["throughput_tokens_per_s"] == pytest.approx(64, rel=0.25)  # 4 requests/s of 16 tokens
    if tool == "sglang":
        assert table["throughput_tokens_per_s"] == theirs(tool)["throughput"]


@pytest.mark.parametrize("tool", FILES)
def test_failed_requests_are_counted_with_their_reason(tool):
    samples, _ = read(tool, 20, failing=True)
    found = measured_of(samples)
    assert (found.answered, found.failed) == (15, 5)
    (reason,) = found.failures
    assert REFUSED[tool] in reason
    more = measured_of(read(tool, 22, failing=True)[0])
    assert more.failures["no reason is given"] == 2  # requests that the file does not mention


def asked(tool: str, load: Load) -> list[str]:
    return BENCHES[tool].words(Asked(tool, [SERVER], "name", "/tok", load, requests_of(load), "/tmp/x"))


GOLDEN = {
    "vllm": "vllm bench serve --backend openai --base-url http://127.0.0.1:8000 --endpoint /v1/completions --model name --tokenizer /tok "
    "--dataset-name random --random-input-len 32 --random-output-len 8 --num-prompts 240 --seed 3 --ignore-eos --disable-tqdm "
    "--save-result --save-detailed --result-dir /tmp/x --result-filename result.json --request-rate 4.0",
    "sglang": "sglang -m sglang.bench_serving --backend sglang-oai --base-url http://127.0.0.1:8000 --model name --tokenizer /tok "
    "--dataset-name random-ids --random-input-len 32 --random-output-len 8 --random-range-ratio 1.0 --num-prompts 240 --seed 3 "
    "--disable-tqdm --output-details --output-file /tmp/x/result.jsonl --request-rate 4.0",
    "aiperf": "aiperf profile --model name --url http://127.0.0.1:8000 --endpoint-type completions --streaming --tokenizer /tok --isl 32 "
    "--isl-stddev 0 --osl 8 --osl-stddev 0 --extra-inputs ignore_eos:true --use-legacy-max-tokens --use-server-token-count "
    "--request-count 240 --random-seed 3 --artifact-dir /tmp/x --export-level records --ui none --no-gpu-telemetry "
    "--no-server-metrics --arrival-pattern poisson --request-rate 4.0",
    "guidellm": "guidellm run --backend kind=openai_http,target=http://127.0.0.1:8000,model=name,request_format=/v1/completions "
    "--profile kind=poisson,rate=4.0 --constraint kind=max_requests,count=240 --tokenizer kind=hf_auto,model=/tok "
    "--data kind=synthetic_text,prompt_tokens=32,output_tokens=8 --seed kind=static,value=3 --output kind=json,path=/tmp/x/result.json "
    "--disable-console",
}
USERS = {"vllm": "--max-concurrency 9", "sglang": "--max-concurrency 9", "aiperf": "--concurrency 9", "guidellm": "kind=concurrent,streams=9"}  # fmt: skip


@pytest.mark.parametrize("tool", GOLDEN)
def test_command_lines(tool):
    assert " ".join(asked(tool, Load(((32, 8),), 4.0, seed=3))) == GOLDEN[tool]
    users = " ".join(asked(tool, Load(((32, 8),), None, 9)))
    assert USERS[tool] in users
    assert not any(word in users for word in ("rate=", "--request-rate", "poisson"))


def stand_in(folder: Path, tool: str, result: str | None = "", code: int = 0) -> str:
    """A program that leaves this result; the PATH that has it."""
    folder.mkdir(exist_ok=True)
    place, bench = folder / BENCHES[tool].program, BENCHES[tool]
    source = "" if result is None else result or str(DATA / FILES[tool])
    text = STAND_IN.format(python=sys.executable, calls=str(folder / "calls"), result=source, name=bench.result, code=code)  # fmt: skip
    place.write_text(text)
    place.chmod(0o755)
    return f"PATH={folder}:/usr/bin:/bin"


def validate(tmp_path, path_variable, *words, made=None):
    path = saved(made or serving_plan(), tmp_path)
    more = ["--files", str(fake_files(tmp_path / "files", "ok")), "--cpu", "--env", path_variable, "--json", *words]
    return run(["validate", str(path), "--level", "engine", *more]), path


@pytest.mark.parametrize("tool", FILES)
def test_the_command(tool, capsys, tmp_path):
    code, path = validate(tmp_path, stand_in(tmp_path / "bin", tool), "--bench", tool, "--requests", "50")
    out, err = capsys.readouterr()
    assert code == 0, err
    tree, title = json.loads(out), BENCHES[tool].title
    assert (tree["validation"]["requests"], tree["validation"]["client"]) == (50, title)
    assert f"50 requests were answered, 0 failed (client: {title})." in tree["notes"]
    assert tree["validation"]["measured"]["weights_gib"] == 1.5
    assert tree["validation"]["measured"]["ttft_ms"] == pytest.approx(measured_of(read(tool)[0]).table()["ttft_ms_p95"])
    assert tree["limits"][0]["verdict"] in ("held", "cannot say")
    assert "requests are over it" in tree["limits"][0]["why"]
    assert load_plan(path).validation["client"] == title
    words, _ = json.loads((tmp_path / "bin/calls").read_text())
    assert "tiny/llama" in " ".join(words)  # the name that the server gave


@pytest.mark.parametrize("tool", FILES)
@pytest.mark.parametrize(
    ("result", "code", "said"),
    [(None, 0, "wrote no "), (None, 7, "ended with exit code 7"), ("/dev/null", 0, "is not understood")],
)
def test_a_tool_that_fails(tool, result, code, said, capsys, tmp_path):
    """Asked for: an error with its last lines. Not asked for: planner's own client measures, and the notes say why."""
    found = stand_in(tmp_path / "bin", tool, result, code)
    if tool == "aiperf" and result == "/dev/null":
        said = "none of 45 requests was answered"  # a file without lines is a run without answers
    assert validate(tmp_path, found, "--bench", tool, "--requests", "45")[0] == 2
    err = capsys.readouterr().err
    assert said in err
    if "none of" in said:
        return
    assert "  | the last line" in err
    engine = {"sglang": "sglang"}.get(tool, "vllm")
    made = serving_plan()
    made = replace(
        made, deployment=replace(made.deployment, engine=engine, engine_version=engine_named(engine).version)
    )
    assert validate(tmp_path, found, "--requests", "5", made=made)[0] == 0
    tree = json.loads(capsys.readouterr().out)
    assert tree["validation"]["client"] == "planner"
    assert any(note.startswith(f"{BENCHES[tool].title} was not used: ") and said in note for note in tree["notes"])


@pytest.mark.parametrize("tool", FILES)
def test_a_tool_that_is_not_there(tool, capsys, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text("#!/bin/sh\nexit 1\n")  # a Python without sglang
    (tmp_path / "bin/python3").chmod(0o755)
    assert validate(tmp_path, f"PATH={tmp_path}/bin:/usr/bin:/bin", "--bench", tool)[0] == 2
    err = capsys.readouterr().err
    assert f"--bench {tool} needs the p" in err
    assert "pip install" in err
    assert len(err.splitlines()) == 1 or "  | " in err


def with_tools(monkeypatch, *names):
    monkeypatch.setattr(
        engine_bench, "installed", lambda bench, env: f"/bin/{bench.name}" if bench.name in names else None
    )


@pytest.mark.parametrize(
    ("engine", "there", "wanted"),
    [
        ("vllm", ("vllm", "sglang", "aiperf"), "vllm"), ("sglang", ("vllm", "sglang", "guidellm"), "sglang"),
        ("transformers", ("vllm", "aiperf", "guidellm"), "aiperf"), ("vllm", ("guidellm", "sglang"), "guidellm"), ("vllm", ("sglang",), None),
    ],
)  # fmt: skip
def test_which_client_is_chosen(engine, there, wanted, monkeypatch):
    """The engine's own, else aiperf, else guidellm, else planner's."""
    with_tools(monkeypatch, *there)
    made = serving_plan()
    made = replace(
        made, deployment=replace(made.deployment, engine=engine, engine_version=engine_named(engine).version)
    )
    found = choose(made, Options(Load(((32, 8),), 4.0)), [SERVER])
    assert (found.bench.name if found.bench else None) == wanted
    assert found.notes == ()
    assert choose(made, Options(Load(((32, 8),), 4.0), bench=OWN), [SERVER]).bench is None


def test_what_a_tool_cannot_send(monkeypatch):
    """Lengths of a trace, several servers, a key: the next one that can, with a note; an error where it was asked for."""
    with_tools(monkeypatch, "vllm", "aiperf")
    made, load = serving_plan(), Load(((32, 8),), 4.0)
    two = choose(made, Options(load), [SERVER, SERVER])
    assert two.bench is BENCHES["aiperf"]
    assert two.notes == ("vllm bench serve was not used: it loads one server, and there are 2.",)
    trace = choose(made, Options(replace(load, lengths=((1, 2), (3, 4)))), [SERVER])
    assert trace.bench is None
    assert len(trace.notes) == 2
    keyed = replace(SERVER, headers=(("Authorization", "Bearer secret"),))
    assert choose(made, Options(load), [keyed]).bench is BENCHES["vllm"]
    with pytest.raises(
        engine_bench.InputError, match="--bench aiperf cannot send this load: it takes an API key only on"
    ):
        choose(made, Options(load, bench="aiperf"), [keyed])
    nameless = replace(made, model=replace(made.model, hf_id=None))
    assert "names no checkpoint" in choose(nameless, Options(load), [SERVER]).notes[0]


def test_the_names_of_the_command_are_those_of_the_tools():
    assert (AUTO, OWN, *BENCHES) == validate_engine.BENCHES
