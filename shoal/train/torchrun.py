"""A process that torchrun has started, on its way to be a worker of a job.

The first of a host starts the job's launcher; all of them come to its hall (`launch/hall.py`) and wait there.
"""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time

from shoal import errors
from shoal.control.environment import WorkerEnvironment
from shoal.control.torchrun import Torchrun

_MEET_S = 600.0  # what others do before they come here
_LOOK_S = 0.05
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


class Guest:
    """This process in the hall."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = False

    def wait(self) -> WorkerEnvironment:
        """What this process is told when it becomes a worker. Fails with JobNotFound if the job ends before that."""
        data, ancillary, _, _ = self._connection.recvmsg(1 << 18, socket.CMSG_SPACE(4))
        fds = array.array("i")
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds.frombytes(content[:4])
        if not data or not fds:
            raise errors.JobNotFound("the job has ended before this process was in it; see what it said")
        os.environ.update({**json.loads(data)["env"], "SHOAL_CHANNEL_FD": str(fds[0])})
        threading.Thread(target=self._end_with_launcher, name="shoal-guest", daemon=True).start()
        # torchrun sends its signals to the process group. Loader processes end with this one, and not before it.
        os.register_at_fork(after_in_child=lambda: os.setpgid(0, 0))
        return WorkerEnvironment.from_env(os.environ)

    def asked(self, signum: int) -> None:
        """The process was asked to end."""
        self._say({"asked": int(signum)})

    def leave(self, exit_code: int) -> None:
        """It is a worker no more, and may go on with what is its own."""
        self._left = True
        self._say({"left": exit_code})

    def _say(self, packet: dict[str, int]) -> None:
        try:
            self._connection.send(json.dumps(packet).encode())
        except OSError:  # the launcher has ended
            pass

    def _end_with_launcher(self) -> None:
        self._connection.recv(1)
        if not self._left:
            os.write(2, b"shoal: the launcher of the job has ended, and so does this worker\n")
            os._exit(1)


def arrive(torchrun: Torchrun, environment: WorkerEnvironment) -> Guest:
    """Go to the hall of this round; if this is the first process of the host, start who keeps it. Fails with
    SettingsContradict, JobNotFound."""
    if torchrun.hosts_too and not environment.invitation:
        raise errors.SettingsContradict(
            "torchrun with several nodes: name the invitation of a job that runs with SHOAL_INVITATION, or start the "
            "hosts with shoal run -H"
        )
    launcher = None
    if torchrun.rank == 0:
        command = [sys.executable, "-m", "shoal", "torchrun", "--agent", str(os.getppid()), "--", *sys.argv]
        launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    latest_s = time.monotonic() + _MEET_S
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(torchrun.hall)
            break
        except OSError:
            connection.close()
        if launcher is not None and launcher.poll() is not None:
            sys.exit(launcher.returncode or 1)  # it has said why
        if time.monotonic() > latest_s:
            raise errors.JobNotFound(f"the first process of this host has started no job within {_MEET_S:g} s")
        time.sleep(_LOOK_S)
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
        raise errors.JobNotFound("another user's process has the address of this job; start torchrun again")
    return Guest(connection)
