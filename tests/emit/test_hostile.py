"""Model names that try to break out of the script: quoted as one word, or refused."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.emit import render
from planner.errors import InvalidValueError
from tests.emit.helpers import started, value_of
from tests.emit.plans import GOLDEN, offer, plan, with_model

QUOTED = [
    "./my model",
    "it's",
    'say "hi"',
    "$(touch pwned)",
    "`touch pwned`",
    "a;touch pwned",
    "a&&b",
    "a|b",
    "$HOME",
    "${PATH}",
    "*",
    "a\\b",
    "ünïcödé/模型",
    "a#b",
    "!!",
    "~root",
    "{a,b}",
    "%s",
    "a'$(touch pwned)'b",
    "C:\\models\\x",
    "a: b",
    "- x",
    " leading",
]
REFUSED = ["-h", "--help", "a\nb", "a\rb", "a\x00b", "", "  ", "a\x1b[31m", "a\u2028b"]


@pytest.mark.parametrize("name", [q for q in QUOTED if not q.startswith("-")])
def test_the_engine_gets_the_name_as_one_word(name: str, tmp_path: Path) -> None:
    texts = render(with_model(GOLDEN["vllm-tp4"], name))
    ((_, _, words),) = started(texts, tmp_path)
    assert words[1] == name
    assert value_of(words, "--served-model-name") == name
    assert not list(tmp_path.rglob("pwned"))
    config = next(yaml.safe_load_all(texts["kubernetes.yaml"]))
    assert config["data"]["serve.sh"] == texts["serve.sh"]


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    with pytest.raises(InvalidValueError) as caught:
        render(with_model(GOLDEN["vllm-tp4"], name or " "))
    assert "\n" not in str(caught.value)


def test_hostile_offers_are_refused_too() -> None:
    for field in ("instance_type", "region", "gpu", "provider"):
        with pytest.raises(InvalidValueError):
            render(plan(offers=(offer(**{field: "x\nrm -rf /"}) if field != "gpu" else offer("x\ny"),)))


@pytest.mark.parametrize("name", ["$(touch pwned)", 'it\'s "x"', "a\\", '"""', "{x}"])
@pytest.mark.parametrize("golden", ["deepspeed-tp2", "transformers-nf4"])
def test_python_scripts_hold_the_name_as_data(name: str, golden: str) -> None:
    texts = render(with_model(GOLDEN[golden], name))
    text = next(t for n, t in texts.items() if n.endswith(".py"))
    space: dict[str, dict[str, object]] = {}
    exec(text[text.index("PLAN = ") : text.index("\nMODEL = ")], space)
    assert space["PLAN"]["model"] == name
    compile(text, "script", "exec")


@settings(max_examples=60, deadline=None)
@given(
    name=st.text(min_size=1, max_size=40),
    golden=st.sampled_from(["vllm-moe-two-replicas", "sglang-two-nodes", "tgi-awq", "deepspeed-tp2"]),
)
def test_any_name_is_quoted_or_refused(name: str, golden: str) -> None:
    try:
        texts = render(with_model(GOLDEN[golden], name))
    except InvalidValueError:
        return
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "serve.sh"
        script.write_text(texts["serve.sh"], "utf-8")
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False).returncode == 0
        line = next(x for x in texts["serve.sh"].split("\n") if x.startswith("planned_model="))
        shown = subprocess.run(["bash", "-c", f'{line}\nprintf %s "$planned_model"'], capture_output=True, check=True)
    assert shown.stdout.decode() == name
    for text in (t for n, t in texts.items() if n.endswith(".yaml")):
        list(yaml.safe_load_all(text))
