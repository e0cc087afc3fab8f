"""What is shown, line by line."""

from __future__ import annotations

import io

from rich.console import Console

from shoal.data.progress import Progress
from shoal.launch.screen import Screen, bar, live_line, progress_line, transition_line


def test_generation_is_told_as_a_transition_and_other_events_are_left_to_the_log():
    left = {"event": "generation", "number": 4, "members": ["w0"], "paused": True, "cause": "w2 left (signal 9)"}
    assert transition_line(left) == "generation 3 → 4: w2 left (signal 9), 1 worker, paused"
    fenced = {"event": "fenced", "worker_id": "w1", "text": "no sign of life for 5.0 s"}
    assert transition_line(fenced) == "w1 fenced: no sign of life for 5.0 s"
    assert transition_line({"event": "joined", "worker_id": "w1", "text": ""}) is None


STATUS = {
    "step": 1234,
    "epoch": 2,
    "samples": 6000,
    "rate": 5678.9,
    "loss": None,
    "target": 3,
    "phase": "running",
    "workers": [{"rank": 0}, {"rank": None}],
}
PROGRESS = Progress(0, epoch=2, epochs=10, epoch_done=500, epoch_samples=2000, done=4500, total=20_000)


def test_progress_is_one_line_and_has_a_rate_only_while_it_runs():
    assert progress_line(STATUS) == "epoch 3  step 1,234  5,679 samples/s  1 of 3 workers"
    paused = {**STATUS, "loss": 0.12345, "phase": "paused"}
    assert progress_line(paused, PROGRESS) == " 22%  epoch 3 of 10  step 1,234  loss 0.1235  1 of 3 workers  paused"


def test_progress_says_when_it_will_be_done_and_draws_a_bar():
    assert progress_line({**STATUS, "rate": 100.0}, PROGRESS).endswith("  100 samples/s  1 of 3 workers  ETA 2:35")
    assert bar(0.25, 8, plain=True).plain == "##------"
    assert bar(0.99, 8).plain == "━" * 7 + "─"
    assert bar(7.0, 8).plain == "━" * 8


def test_progress_on_a_terminal_has_the_bar_and_the_end_first_and_leaves_out_what_does_not_fit():
    slow = {**STATUS, "rate": 100.0, "loss": 0.12345}
    wide = live_line(slow, PROGRESS, 120).plain
    assert wide.startswith("━━━━━" + "─" * 19 + "  22%  ETA 2:35  epoch 3 of 10  step 1,234")
    assert wide.endswith("  100 samples/s  loss 0.1235  1 of 3 workers")
    narrow = live_line(slow, PROGRESS, 80, plain=True).plain
    assert narrow == "###-------------  22%  ETA 2:35  epoch 3 of 10  step 1,234  100 samples/s"
    assert live_line({**slow, "phase": "paused"}, PROGRESS, 40).plain == "━───────  22%  paused  epoch 3 of 10"
    assert live_line(slow, None, 30).plain == "epoch 3  step 1,234"


def test_progress_stays_in_the_last_line_of_a_terminal_and_goes_away():
    err = io.StringIO()
    screen = Screen(err=err, console=Console(file=err, force_terminal=True, width=80, color_system=None))
    screen.progress(STATUS, PROGRESS)
    assert (
        err.getvalue().rstrip().endswith("━━━─────────────  22%  ETA 0:03  epoch 3 of 10  step 1,234  5,679 samples/s")
    )
    screen.close()
    assert err.getvalue().endswith("\x1b[1A\x1b[2K")


def test_quiet_screen_shows_errors_and_summary_only():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(quiet=True, out=out, err=err)
    screen.echo("w0", "hello")
    screen.tell("generation 0 → 1")
    screen.say("finished: 3 steps")
    screen.close()
    assert (out.getvalue(), err.getvalue()) == ("", "finished: 3 steps\n")


def test_text_of_users_is_shown_as_it_is():
    out, err = io.StringIO(), io.StringIO()
    screen = Screen(out=out, err=err)
    screen.echo("w0", "[red]x[/red] :smile: " + "long " * 100)
    screen.say("shape [3, 4] " + "long " * 100)
    assert out.getvalue() == "w0 | [red]x[/red] :smile: " + "long " * 100 + "\n"
    assert err.getvalue().rstrip() == ("shape [3, 4] " + "long " * 100).rstrip()


def test_the_death_of_a_coordinator_is_told_in_a_line():
    event = {"event": "restarted", "text": "after killed by SIGKILL"}
    assert transition_line(event) == "coordinator restarted after killed by SIGKILL"
