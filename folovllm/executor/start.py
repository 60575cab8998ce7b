"""The first lines of a rank: it watches its parent before it imports anything that takes time. Standard library only."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading

PAUSE = 1000  # milliseconds between two checks of the parent's number


def main() -> None:
    """Run the rank that the parent describes, through the descriptor that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    from folovllm.executor.rank import main as run_rank

    run_rank(fd)


def end_with_parent(fd: int) -> None:
    """End this process as soon as its parent is gone, whatever it is doing.

    The parent's end of the connection `fd` is closed then, unless a fork of the parent has a copy. So this checks the
    parent's process number, too. It reads nothing: what the parent says is for the rank.
    """
    parent, connection = os.getppid(), select.poll()
    connection.register(fd, 0)  # of no event but the end
    while not connection.poll(PAUSE) and os.getppid() == parent:
        pass
    os._exit(1)


if __name__ == "__main__":
    main()
