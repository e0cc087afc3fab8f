"""What the command line tells and draws of a topology."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shoal import cli
from shoal.report.topology import svg
from shoal.sync.topology import EXAMPLES, parse
from shoal.view.topology import Canvas, facts_of, lines_of, number, picture, sent_in

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "80")


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(["topology", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_facts_of_a_ring_are_those_of_the_books(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(told(capsys, "show", "ring", "-n", "7", "--json"))
    assert facts["spectral_gap"] == pytest.approx(1 - (1 + 2 * math.cos(2 * math.pi / 7)) / 3)
    assert facts["steps_to_a_thousandth"] == math.ceil(math.log(1000) / -math.log(facts["rate"]))
    expected = {"workers": 7, "period": 1, "out_degree": [2, 2], "in_degree": [2, 2], "sends": 2.0, "diameter": 3,
                "undirected": True, "regular": True, "stochastic": "doubly"}  # fmt: skip
    assert {name: facts[name] for name in expected} == expected
    third = pytest.approx(1 / 3)
    assert facts["neighbors"][0] == {"self_weight": third, "sources": {"1": third, "6": third},
                                     "destinations": {"1": third, "6": third}}  # fmt: skip


def test_other_weights_are_told_with_what_they_do_to_the_average(capsys: pytest.CaptureFixture[str]) -> None:
    assert "average       is kept" in told(capsys, "show", "star", "-n", "5")
    uniform = told(capsys, "show", "star", "-n", "5", "--weights", "uniform")
    assert uniform.startswith("uniform(star), 5 workers\n")
    assert "average       moves" in uniform
    assert "weights       column stochastic" in uniform


def test_of_a_schedule_the_step_asked_for_is_shown_and_the_period_is_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = told(capsys, "show", "one_peer(exponential_2)", "-n", "8", "--step", "5")
    for said in ("period        3 steps", "1.000 over a period", "in 3 steps", "each rank sends to +4", "step 5"):
        assert said in shown


def test_a_schedule_without_a_period_says_how_much_of_it_was_seen() -> None:
    facts = facts_of(parse("random_matching"), 9)
    assert dict(lines_of(facts))["period"] == "none; 64 steps seen"
    assert facts["spectral_gap"] is None
    assert facts["steps_to_a_thousandth"] > 0


def test_hosts_are_their_sizes_and_give_the_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    facts = json.loads(told(capsys, "show", "inner_outer_ring", "--hosts", "2,3", "--json"))
    assert (facts["workers"], facts["hosts"]) == (5, [0, 0, 1, 1, 1])
    assert facts["period"] == 3


@pytest.mark.parametrize("workers", ["1", "2", "13", "40"])
def test_the_list_has_a_line_for_each_and_fits_80_columns(workers: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "list", "-n", workers).splitlines()
    assert [line.split()[0] for line in lines[2:]] == [str(parse(spec)) for spec in EXAMPLES]
    assert max(map(len, lines)) <= 80


def test_the_list_for_programs_has_the_same_facts(capsys: pytest.CaptureFixture[str]) -> None:
    listed = json.loads(told(capsys, "list", "-n", "6", "--json"))
    assert [facts["topology"] for facts in listed] == list(EXAMPLES)
    assert listed[0]["diameter"] == 3


@pytest.mark.parametrize("workers", [1, 2, 7, 24, 25, 256])
@pytest.mark.parametrize("spec", ["ring", "exponential_2", "star", "random_matching"])
def test_what_is_shown_fits_80_columns(spec: str, workers: int, capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, "show", spec, "-n", str(workers)).splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 26


@pytest.mark.parametrize("workers", range(1, 25))
def test_every_rank_is_in_the_circle(workers: int) -> None:
    drawn = re.findall(r"\d+", picture(parse("ring").mixing(workers)).plain)
    assert sorted(map(int, drawn)) == list(range(workers))


def test_what_goes_one_way_has_arrows_and_what_goes_both_ways_has_none() -> None:
    arrows = set("→↘↓↙←↖↑↗")
    assert len(arrows & set(picture(parse("ring(right)").mixing(8)).plain)) > 3
    assert not arrows & set(picture(parse("ring").mixing(8)).plain)


def test_of_many_workers_the_matrix_is_drawn_with_a_dot_for_each_edge() -> None:
    drawn = picture(parse("ring(right)").mixing(40)).plain
    assert sum((ord(letter) - 0x2800).bit_count() for letter in drawn if ord(letter) >= 0x2800) == 40


def test_a_dot_is_where_it_is_put() -> None:
    canvas = Canvas(2, 1)
    canvas.dot(0, 0)
    canvas.dot(3, 3)
    canvas.dot(9, 9)  # outside
    assert canvas.text().plain == "⠁⢀"


def test_whom_ranks_send_to_is_told_by_distance_where_it_is_everybodys() -> None:
    assert [*sent_in(facts_of(parse("ring"), 8))] == ["each rank sends to ±1"]
    assert [*sent_in(facts_of(parse("fully_connected"), 4))] == ["each rank sends to ±1, +2"]
    assert [*sent_in(facts_of(parse("exponential_2"), 9))] == ["each rank sends to +1, +2, +4, +8"]
    assert [*sent_in(facts_of(parse("star"), 3))] == ["0 → 1, 2", "1 → 0", "2 → 0"]
    assert [*sent_in(facts_of(parse("star"), 1))] == ["nobody sends"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.000"), (1.0, "1.000"), (0.25, "0.250"), (0.00021, "0.00021"), (0.99979, "0.99979"), (1e-17, "0.000")],
)
def test_numbers_that_are_nearly_0_or_1_have_the_digits_that_say_so(value: float, text: str) -> None:
    assert number(value) == text


def test_the_svg_has_every_rank_and_every_edge_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told(capsys, "show", "exponential_2", "-n", "8", "--svg", str(tmp_path / "a.svg"))
    root = ElementTree.parse(tmp_path / "a.svg").getroot()
    assert len(root.findall(f".//{SVG}circle")) == 8
    edges = [path for path in root.findall(f"{SVG}path") if path.get("fill") == "none"]
    one_way = [path for path in edges if path.get("marker-end")]
    assert (len(edges), len(one_way)) == (20, 16)  # those 4 away send back
    titles = [title.text or "" for title in root.iter(f"{SVG}title")]
    assert "1 takes 0.25 of 0" in titles
    assert "rank 0: takes 0.25 of itself; hears from 4, 6, 7; sends to 1, 2, 4" in titles


def test_workers_of_a_host_have_a_color_of_their_own() -> None:
    drawn = svg(parse("ring").mixing(4), "a < b", [], ["x", "y", "x", "y"])
    circles = list(ElementTree.fromstring(drawn).iter(f"{SVG}circle"))
    colors = [circle.get("stroke") for circle in circles]
    assert colors[0] == colors[2] != colors[1] == colors[3]
