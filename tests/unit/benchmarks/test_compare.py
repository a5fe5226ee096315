"""The ratios are of the faster types of both, and null where a peer did not run."""

import pytest

from benchmarks.compare import last_json_line, ratios
from benchmarks.report import Report, rounded
from benchmarks.workload import Figures

_OURS = Figures({1: 0.01, 8: 0.02}, {512: 1.0})


def test_ratios_are_against_the_faster_type_figure_by_figure() -> None:
    runs = {
        "ours quantized": _OURS,
        "ours bfloat16": Figures({1: 0.02, 8: 0.03}, {512: 2.0}),
        "vllm float32": Figures({1: 0.03, 8: 0.03}, {512: 4.0}),
        "vllm bfloat16": Figures({1: 0.02, 8: 0.06}, {512: 0.5}),
        "llamacpp plain": Figures({1: 0.005, 8: 0.02}, {512: 2.0}),
    }
    assert ratios(runs) == {
        "decode_over_vllm": {"1": 2.0, "8": 1.5},
        "decode_over_llamacpp": {"1": 0.5, "8": 1.0},
        "prefill_over_vllm": {"512": 0.5},
        "prefill_over_llamacpp": {"512": 2.0},
    }


def test_a_peer_that_did_not_run_has_null_ratios() -> None:
    runs = {
        "ours bfloat16": _OURS,
        "vllm float32": None,
        "vllm bfloat16": None,
        "llamacpp plain": _OURS,
    }
    result = ratios(runs)
    assert result["decode_over_vllm"] == {"1": None, "8": None}
    assert result["prefill_over_vllm"] == {"512": None}
    assert result["decode_over_llamacpp"] == {"1": 1.0, "8": 1.0}


def test_the_answer_is_found_among_what_a_peer_prints() -> None:
    assert last_json_line('loading\n{"a": 1}\n\n{"b": 2}\nbye\n') == '{"b": 2}'
    with pytest.raises(ValueError, match="no figures"):
        last_json_line("nothing\n")


def test_the_last_line_is_json_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.table("A title", ("batch", "tokens/s"), [("1", "2.0")])
    report.last_line({"rates": rounded({index: index / 3 for index in range(60)})})
    lines = capsys.readouterr().out.splitlines()
    assert "A title" in lines
    assert lines[-1].startswith('{"rates": {"0": 0.0, "1": 0.33')
    assert lines[-1].endswith("}}")
