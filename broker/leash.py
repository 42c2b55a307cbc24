"""A leash: a child that dies with the process that started it, whatever kills that.

`python -m broker.leash PARENT_PID -- argv…` asks the Linux kernel to kill it when its parent ends,
and then becomes argv. The kernel watches the *thread* that spawned the child: spawn from the main
thread. Elsewhere than Linux it only becomes argv.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def leashed(argv: Sequence[str]) -> list[str]:
    """The command line that runs argv on a leash held by this process."""
    return [sys.executable, "-m", "broker.leash", str(os.getpid()), "--", *argv]


def main(parent: int, argv: Sequence[str]) -> None:
    """Take the leash, then become argv; exits at once when the parent is already gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)
    os.execvp(argv[0], list(argv))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[3:])
