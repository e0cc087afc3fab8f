"""What a worker whose script failed tells its launcher."""

from __future__ import annotations

import os
import traceback
from types import TracebackType

from shoal import errors

_TRACEBACK_CHARACTERS = 16_000


def one_line(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(type(error), error)[-1].split())[:500]


def _from_script(frames: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback as `python script.py` would show it: without what lies above the script."""
    while frames is not None and frames.tb_frame.f_code.co_filename != script:
        frames = frames.tb_next
    return frames


def last_words(error: BaseException, script: str) -> tuple[dict[str, str], int]:
    """What the launcher is told of it, and the worker's exit status."""
    if isinstance(error, errors.ShoalError):
        return {"error": type(error).__name__, "message": str(error)}, errors.exit_code(error)
    frames = _from_script(error.__traceback__, script)
    text = "".join(traceback.format_exception(type(error), error, frames))
    import torch

    # Of a model file's job the script is shoal's own: what is wrong is in the file that it calls.
    ours = os.path.dirname(os.path.dirname(__file__)) + os.sep
    places = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(frames)]
    foreign = (ours, os.path.dirname(os.path.dirname(torch.__file__)) + os.sep)
    theirs = [place for place in places if not place[0].startswith(foreign)] if script.startswith(ours) else []
    file, number = (theirs or [place for place in places if place[0] == script] or [(script, 0)])[-1]
    where = f"{os.path.basename(file)}, line {number}" if number else os.path.basename(file)
    message = f"{where}: {one_line(error)}"
    return {"error": "ScriptFailed", "message": message, "traceback": text[-_TRACEBACK_CHARACTERS:]}, 1
