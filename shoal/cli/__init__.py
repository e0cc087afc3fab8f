"""The command line. It never imports torch, so that it answers at once.

Exit codes: 0 the job finished or was stopped; 2 something the user can put right, told in one line; 1 the job failed;
128 + n after signal n.
"""

from shoal.cli.shell import app, main

from shoal.cli import start, hosts, torchrun, model_file, look, command, certs, topology  # isort: skip  # in the order of `shoal --help`

__all__ = ["app", "certs", "command", "hosts", "look", "main", "model_file", "start", "topology", "torchrun"]
