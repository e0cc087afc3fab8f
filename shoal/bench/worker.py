"""One process of a measured group: `python -m shoal.bench.worker FD`, commanded over the socket FD.

First comes a `Setup` and the cores to stay on; the answer is True once the body is ready. Then each `(lead_in, steps)`
is answered with the seconds that the `steps` took; None ends the process. Between commands it is blocked in a
read.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection

from shoal.bench.bodies import body
from shoal.process import die_with
from shoal.sync.memory import keep_freed_memory


def main(descriptor: int) -> None:
    die_with(os.getppid())
    runner = Connection(descriptor)
    setup, cores = runner.recv()
    # Before torch is imported: its threads inherit the cores, and every block it ever frees is kept.
    os.sched_setaffinity(0, cores)
    if setup.keep_freed_memory:
        keep_freed_memory()
    step = body(setup.body)(setup)
    runner.send(True)
    while (command := runner.recv()) is not None:
        lead_in, steps = command
        for _ in range(lead_in):
            step()
        began_s = time.perf_counter()
        for _ in range(steps):
            step()
        runner.send(time.perf_counter() - began_s)


if __name__ == "__main__":
    main(int(sys.argv[1]))
