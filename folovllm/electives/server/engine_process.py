"""The engine's own process: it watches its parent before it imports anything that takes time."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading

from folovllm.distributed.children import end_with_parent

SWITCH = 2e-4  # seconds that the loop waits at most for another thread (a recorder's); Python's default is 5e-3


def main() -> None:
    """Build the engine of the configuration on stdin, and serve the requests that come through the socket named on the command line.

    It ends when that says stop or is closed. Signals are for the parent to answer: it lets running answers end, which takes an engine.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    sys.setswitchinterval(SWITCH)
    from folovllm.electives.server.messages import NOT_SENT, Failure
    from folovllm.electives.server.transport import SocketLink
    from folovllm.engine.llm_engine import make_engine

    link, is_well = SocketLink(socket.socket(fileno=fd)), False
    try:
        config = pickle.load(sys.stdin.buffer)
    except (AttributeError, ImportError) as error:  # a class of the user's main program, say
        link.send(Failure(f"{NOT_SENT} ({error})", True))
    else:
        is_well = link.serve(config, make_engine)
    sys.stdout.flush()
    os._exit(0 if is_well else 1)  # the interpreter would take seconds to take itself apart


if __name__ == "__main__":
    main()
