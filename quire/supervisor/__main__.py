"""Entry point of the engine process: `python -m quire.supervisor FD`; FD is the file descriptor of a socket."""

import os
import socket
import sys

from quire.preload import import_with_torch

if __name__ == "__main__":
    run = import_with_torch("quire.supervisor.engine_main").run
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        run(connection)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine is closed, and without this the process at times aborted after the end of Python
