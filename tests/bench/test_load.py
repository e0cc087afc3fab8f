from __future__ import annotations

import subprocess
import sys

from shoal.bench.load import Load, LoadProbe, load_doubts, this_machine


def load(other: float, stolen: float = 0.0) -> Load:
    return Load(wall_s=1.0, load_average=(0.0, 0.0, 0.0), other_cpu_share=other, stolen_cpu_share=stolen)


def test_a_machine_of_our_own_raises_no_doubt_and_neither_does_no_measurement() -> None:
    assert load_doubts([load(0.01), load(0.02)]) == []
    assert load_doubts([]) == []


def test_a_busy_machine_is_a_doubt_with_its_mean_and_its_worst_round() -> None:
    (doubt,) = load_doubts([load(0.1), load(0.3)])
    assert "20%" in doubt
    assert "worst round 30%" in doubt


def test_stolen_time_is_told_apart_from_other_processes() -> None:
    (doubt,) = load_doubts([load(0.0, stolen=0.5)])
    assert "hypervisor" in doubt


def test_the_cpu_time_of_our_own_children_is_ours_even_when_they_have_ended() -> None:
    probe = LoadProbe()
    before_s = probe._before.ours_s
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.5: pass"], check=True)
    probe.end()
    probe.begin()
    assert probe._before.ours_s - before_s >= 0.45


def test_this_machine_says_what_a_figure_must_name() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.processor
    assert machine.torch[0].isdigit()
