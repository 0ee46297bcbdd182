"""The table of precisions: sane, sourced, complete."""

import pytest

from planner.errors import UnknownNameError
from planner.models.precision import kv_dtype, kv_dtypes, precision, precisions


def test_the_methods_people_use_are_there():
    names = {p.name for p in precisions()}
    assert {
        "bf16",
        "fp16",
        "fp32",
        "fp8",
        "fp8-block",
        "int8-w8a8",
        "int4-awq",
        "int4-gptq",
        "bnb-int8",
        "bnb-nf4",
        "mxfp4",
        "nvfp4",
        "ternary",
    } <= names
    assert {d.name for d in kv_dtypes()} >= {"bf16", "fp16", "fp8", "fp8_e5m2", "int8"}


@pytest.mark.parametrize("p", precisions(), ids=lambda p: p.name)
def test_rows_are_sane(p):
    assert 1 <= p.bits <= 32
    assert 0 <= p.overhead_bits < 2
    assert p.compute_dtype in {"fp32", "fp16", "bf16", "fp8", "int8", "fp4"}
    assert 0 <= p.accuracy_loss_percent < 20
    assert p.source
    assert p.accuracy_source
    assert p.bytes_per_weight == (p.bits + p.overhead_bits) / 8
    assert p.servable or p.native_only


def test_exact_methods_lose_nothing():
    assert [p.name for p in precisions() if p.accuracy_loss_percent == 0 and not p.native_only] == [
        "bf16",
        "fp16",
        "fp32",
    ]


def test_four_bits_are_a_choice_not_a_surprise():
    """The default limit of 1% keeps plain 4-bit methods out and 8-bit ones in."""
    free = {p.name for p in precisions() if p.accuracy_loss_percent <= 1.0 and p.servable and not p.native_only}
    assert {"bf16", "fp8", "int8-w8a8"} <= free
    assert not {"int4-awq", "int4-gptq", "bnb-nf4"} & free


def test_unknown_names():
    with pytest.raises(UnknownNameError, match="fp8"):
        precision("fp9")
    with pytest.raises(UnknownNameError):
        kv_dtype("fp7")
