"""The command line itself: an option with one value is given once, and a group without a command shows its help."""

from __future__ import annotations

import pytest

from planner.cli.main import run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["solve", "--model", "8b", "--on", "2xrtx-4090", "--on", "1xh100-sxm"], "--on is given 2 times: it takes one value, and the last would replace the others. Write kinds of own machines in one: --on 2xrtx-4090,1xh100-sxm"),
        (["estimate", "--model", "8b", "--gpu", "l4", "--tp", "2", "--tensor-parallel", "4"], "--tensor-parallel is given 2 times"),
        (["compare", "-m", "8b", "--model", "8b"], "Give --model once"),
        (["memory", "--model", "8b", "--gpu", "l4", "--precision", "fp8", "--precision", "bf16"], "--precision is given 2 times"),
        (["emit", "plan.yaml", "--out", "a", "--out", "b"], "--out is given 2 times"),
        (["validate", "plan.yaml", "--level", "dry", "--level", "engine"], "--level is given 2 times"),
        (["accuracy", "--serving", "a", "--serving", "b", "--serving", "c"], "--serving is given 3 times"),
        (["calibrate", "--out", "a", "--device", "cpu", "--device", "cuda"], "--device is given 2 times"),
        (["catalog", "list", "--limit", "1", "--limit", "2"], "--limit is given 2 times"),
        (["model", "show", "8b", "--revision", "a", "--revision", "b"], "--revision is given 2 times"),
    ],
)  # fmt: skip
def test_an_option_given_twice_is_refused(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error
    assert not list(tmp_path.iterdir())


def test_the_way_out_of_two_kinds_of_machines_works(capsys):
    assert run(["solve", "--model", "8b", "--on", "2xrtx-4090,1xh100-sxm"]) == 0
    assert "1 x own machine with" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["compare", "--model", "8b", "--gpu", "l4", "--format", "csv", "--json"], "--json and --format csv exclude each other"),
        (["model", "show", "8b", "--revision", ""], "--revision is empty"),
        (["model", "show", "8b", "--revision", "main", "--offline"], "--revision needs the hub, which knows '8b' as"),
        (["solve", "--task", "train", "--model", "8b", "--on", "1xh100-sxm", "--tokens", "1e-5"], "--tokens is 1e-05: a run has a token at least"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(capsys, words, said):
    assert run(words) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    assert said in error


def test_repeatable_options_and_flags_may_be_repeated(capsys):
    assert run(["catalog", "list", "--gpu", "l4", "--gpu", "l40s", "--limit", "1", "--json", "--json"]) == 0
    assert '"gpu"' in capsys.readouterr().out


@pytest.mark.parametrize("group", [[], ["catalog"], ["model"]])
def test_without_a_command_the_help_is_shown(capsys, group):
    """As the command line library does it: the help in its own lines on stderr, exit code 2."""
    assert run(group) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("Usage: ")
    assert "\nCommands:\n" in shown
    assert shown.count("\n") > 8
