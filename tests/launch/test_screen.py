"""What is shown, line by line."""

from __future__ import annotations

import io

from shoal.launch.screen import Screen, Tail, progress_line, transition_line


def test_tail_gives_every_line_once_and_half_a_line_only_at_the_end(tmp_path):
    path = tmp_path / "w0.log"
    tail = Tail(path)
    assert tail.lines() == []
    with path.open("w") as log:
        for text, seen in (("one\ntw", ["one"]), ("o\n", ["two"]), ("three", [])):
            log.write(text)
            log.flush()
            assert tail.lines() == seen
    assert tail.lines(last=True) == ["three"]
    assert tail.lines(last=True) == []
    tail.close()


def test_tail_leaves_out_what_lies_behind_the_cut(tmp_path):
    path = tmp_path / "w0.log"
    path.write_text("one\ntwo\nTraceback\n")
    tail = Tail(path)
    tail.cut(len("one\ntwo\n"))
    assert tail.lines(last=True) == ["one", "two"]
    tail.close()


def test_generation_is_told_as_a_transition_and_other_events_are_left_to_the_log():
    left = {"event": "generation", "number": 4, "members": ["w0"], "paused": True, "cause": "w2 left (signal 9)"}
    assert transition_line(left) == "generation 3 → 4: w2 left (signal 9), 1 worker, paused"
    fenced = {"event": "fenced", "worker_id": "w1", "text": "no sign of life for 5.0 s"}
    assert transition_line(fenced) == "w1 fenced: no sign of life for 5.0 s"
    assert transition_line({"event": "joined", "worker_id": "w1", "text": ""}) is None


def test_progress_is_one_line_and_names_the_phase_unless_it_runs():
    status = {"step": 1234, "epoch": 2, "rate": 5678.9, "loss": None, "target": 3, "phase": "paused"}
    status["workers"] = [{"rank": 0}, {"rank": None}]
    assert progress_line(status) == "step 1,234  epoch 2  5,679 samples/s  1 of 3 workers  paused"
    assert "loss 0.1235  1 of 3 workers" in progress_line({**status, "loss": 0.12345, "phase": "running"})


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
