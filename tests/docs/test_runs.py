"""The snippets and commands of the pages run."""

import contextlib
import io
import shlex

import pytest

from planner.cli.main import run
from tests.docs.pages import fences, script

BLOCKS = fences("python-api.md", "python")
COMMANDS = [line[2:] for block in fences("commands.md", "console") for line in block.splitlines()]
MEASURED = """\
task,engine,engine_version,model,gpu,n_gpus,tp,pp,quant,gpu_mem_util,max_model_len,metric,value,evidence
infer,vllm,0.19.0,meta-llama/Llama-3.1-8B-Instruct,H100 (79.18 GiB),1,1,1,bf16,0.9,8192,weights_gib_per_gpu,15.0,made up
"""


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_snippet(number, capsys):
    exec(compile(BLOCKS[number], f"docs/python-api.md block {number + 1}", "exec"), {})
    capsys.readouterr()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in which the commands run one after the other."""
    path = tmp_path_factory.mktemp("commands")
    (path / "memory_measured.csv").write_text(MEASURED)
    return path


@pytest.fixture(scope="module")
def results(folder):
    """Exit code and output of every command, in the order of the page."""
    found = []
    with contextlib.chdir(folder):
        for command in COMMANDS:
            words = shlex.split(command)
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = run(words[1:])
            found.append((words[0], code, out.getvalue(), err.getvalue()))
    return found


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_command(number, results):
    program, code, out, err = results[number]
    assert program == "planner"
    if "pip install '.[profile]'" in err:
        pytest.skip("torch and transformers are the extra 'profile'")
    assert code == 0, (COMMANDS[number], err)
    assert out.strip()


def test_every_command_has_an_example():
    names = set(script("commands-page")["EXAMPLES"])
    assert {n for n in names if any(f"{c} ".startswith(f"planner {n} ") for c in COMMANDS)} == names


def test_accuracy_report_of_a_small_file(tmp_path):
    (tmp_path / "rows.csv").write_text(MEASURED)
    page, scores = script("accuracy-report")["page"]({"memory": tmp_path / "rows.csv"})
    assert page.startswith("Made by `scripts/accuracy-report --memory rows.csv`")
    assert str(tmp_path) not in page
    assert "| all | 1 | 100% |" in page.split("### weights_gib_per_gpu")[1]
    assert "No serving rows were given." in page
    assert [s.metric for s in scores] == ["weights_gib_per_gpu"] * 2


def test_accuracy_report_names_a_task_that_cannot_be_replayed(tmp_path, monkeypatch):
    from planner.errors import InvalidValueError
    from planner.validate import accuracy

    def refuse(task):
        raise InvalidValueError(f"{task} rows cannot be replayed yet")

    monkeypatch.setattr(accuracy, "module_of", refuse)
    lines, scores = script("accuracy-report")["section"]("training", tmp_path / "none.csv")
    assert "training rows cannot be replayed yet" in lines
    assert scores == []


def test_fitted_numbers_are_counted_from_the_data():
    made = script("accuracy-report")
    assert made["time_constants"]() > 0
    assert made["memory_constants"]()[0] >= made["memory_constants"]()[1] > 0


def test_refresh_replaces_only_what_is_known():
    made = script("accuracy-report")
    from planner.validate.accuracy import Score

    score = Score("tpot_ms", "all", 3, 3, 12.34, 1.0, 1.0, 1.0, 1.0)
    assert made["refresh"]("`tpot_ms` (all) 9.04%; `x` (all) 1%", [score]) == "`tpot_ms` (all) 12.3%; `x` (all) 1%"
