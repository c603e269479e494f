"""What the engine starts in place of a worker: ``stand_in.py SOCKET``. The worker itself is forked
from a process that has imported torch (:mod:`tests.monarch.forked`). This one hands it what the
engine has given it, passes signals on, and ends as it ends; when it is killed, so is the worker.
"""

from __future__ import annotations

import _socket
import os
import signal
import sys

_INT = 4
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def _main() -> None:
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    connection.connect(sys.argv[1])
    order = [str(os.getppid()).encode(), os.getcwd().encode()]
    order += [name + b"=" + value for name, value in os.environb.items()]
    streams = b"".join(number.to_bytes(_INT, sys.byteorder) for number in (0, 1, 2))
    handed = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)
    connection.sendmsg([b"\0".join(order)], [handed])
    worker = int(connection.recv(_INT * 4))
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(worker, number))
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):  # whoever reads what the worker writes sees its end
        os.dup2(null, number)
    status = connection.recv(_INT * 4)
    if not status:
        os._exit(1)
    code = os.waitstatus_to_exitcode(int(status))
    if code >= 0:
        os._exit(code)
    if -code not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)


_main()
