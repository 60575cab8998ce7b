"""The first lines of a rank: it watches its parent before it imports anything that takes time."""

from __future__ import annotations

import signal
import sys
import threading

from folovllm.children import end_with_parent


def main() -> None:
    """Run the rank that the parent describes, through the descriptor that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent to answer
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    from folovllm.executor.rank import main as run_rank

    run_rank(fd)


if __name__ == "__main__":
    main()
