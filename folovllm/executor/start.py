"""The entry point of a rank: it watches its parent before the imports that take time."""

from __future__ import annotations

import signal
import sys
import threading

from folovllm.distributed.children import end_with_parent


def main() -> None:
    """Run a rank. The parent sends its `Assignment` through the file descriptor that the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    fd = int(sys.argv[1])
    threading.Thread(target=end_with_parent, args=[fd], daemon=True).start()
    from folovllm.executor.rank import main as run_rank

    run_rank(fd)


if __name__ == "__main__":
    main()
