"""Jobs of users who wrote functions and no loop."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from shoal import errors, recipe
from shoal.control.rundir import RunDir
from shoal.recipe import Recipe, check_model_file, read_config, with_values

DIGITS = Path(__file__).parents[2] / "examples" / "digits_model.py"


def shoal(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "shoal", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_a_model_file_is_trained_scored_and_used(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text('[job]\nworkers = 2\ncheckpoint_every = "off"\n[train]\nepochs = 3\nglobal_batch = 60\n')
    trained = shoal("train", DIGITS, "--config", config, "--dir", tmp_path / "a", "--set", "evaluate_every=2")
    assert trained.returncode == 0, trained.stderr
    assert "0 lost, 0 repeated" in trained.stderr
    assert [line.split(":")[0] for line in trained.stdout.splitlines()] == ["w0 | epoch 2", "w0 | epoch 3"]
    kept = RunDir(tmp_path / "a").settings()
    assert (kept["target"], kept["checkpoint_every"]) == (2, "off")
    assert json.loads(kept["args"][0])["epochs"] == 3
    assert "epoch 3 of 3" in shoal("status", tmp_path / "a").stdout
    scored = shoal("evaluate", DIGITS, "--from", tmp_path / "a", "-n", 2, "--dir", tmp_path / "b", "--json")
    assert scored.returncode == 0, scored.stderr
    used = shoal(
        "predict", DIGITS, "--from", tmp_path / "a", "-n", 1, "--dir", tmp_path / "c", "--out", tmp_path / "p.npy"
    )
    assert used.returncode == 0, used.stderr
    right = (np.load(tmp_path / "p.npy").argmax(1) == load_digits().target[:360]).mean()
    assert json.loads(scored.stdout)["accuracy"] == pytest.approx(right, abs=1e-6)
    assert right > 0.5


def test_a_mistake_in_a_model_file_is_found_there(tmp_path: Path) -> None:
    faulty = tmp_path / "faulty.py"
    faulty.write_text(
        DIGITS.read_text() + "\n\ndef metrics(outputs, targets):\n    return {'accuracy': outputs.nothing}\n"
    )
    line = faulty.read_text().count("\n")
    failed = shoal("train", faulty, "-n", 1, "--dir", tmp_path / "a")
    assert failed.returncode == 2
    assert f"ScriptFailed: faulty.py, line {line}: AttributeError" in failed.stderr


def test_the_command_line_goes_before_the_file_and_weights_are_looked_for_first(tmp_path: Path) -> None:
    config = tmp_path / "job.toml"
    config.write_text(f'[job]\ninit_from = "{tmp_path}/nowhere"\n[train]\nglobal_batch = 60\n')
    refused = shoal("train", DIGITS, "--config", config, "--dir", tmp_path / "a", "--set", "batch_size=4")
    assert refused.returncode == 2
    assert f"{tmp_path}/nowhere" in refused.stderr  # and not that both batch sizes are given
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("name", recipe.NEEDED["train"])
def test_a_missing_function_is_named_with_an_example_of_three_lines(tmp_path: Path, name: str) -> None:
    path = tmp_path / "some.py"
    path.write_text("\n".join(f"def {each}(*_): pass" for each in recipe.NEEDED["train"] if each != name))
    with pytest.raises(errors.ScriptFailed, match=f"has no function {name}, which shoal train needs") as caught:
        check_model_file(path, "train")
    _, *example = str(caught.value).split("\n")
    assert len(example) == 3
    compile("\n".join(example), "example", "exec")
    assert example[0].startswith(f"def {name}(")


def test_functions_may_be_imported_or_assigned(tmp_path: Path) -> None:
    path = tmp_path / "some.py"
    path.write_text("from other import model, loss as loss\noptimizer = dataset = print\n")
    check_model_file(path, "train")


def test_settings_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsContradict, match="both given"):
        Recipe("x.py", batch_size=1, global_batch=2)
    with pytest.raises(errors.SettingsContradict, match="there are accumulate"):
        with_values(Recipe("x.py"), {"epocs": 3}, "job.toml")
    (tmp_path / "job.toml").write_text("[jobs]\n")
    with pytest.raises(errors.SettingsContradict, match=r"there are the tables \[job\] and \[train\]"):
        read_config(tmp_path / "job.toml")
    (tmp_path / "job.toml").write_text("[job\n")
    with pytest.raises(errors.SettingsContradict, match="is not TOML"):
        read_config(tmp_path / "job.toml")
    with pytest.raises(errors.SettingsContradict, match="cannot be read"):
        read_config(tmp_path / "nowhere.toml")
