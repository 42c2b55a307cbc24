"""A child on a leash does not outlive the process that started it, whatever ended that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from conftest import wait_until

from broker.leash import leashed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the leash is Linux's")

# Starts a leashed sleeper, tells its pid, and then lives until it is killed.
PARENT = """
import subprocess, sys
from broker.leash import leashed
child = subprocess.Popen(leashed(["sleep", "600"]))
print(child.pid, flush=True)
child.wait()
"""


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as stat:  # a corpse that nobody has fetched is gone too
        return stat.read().rpartition(")")[2].split()[0] == "Z"


def test_a_killed_parent_takes_its_child_along():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE) as parent:
        child = int(parent.stdout.readline())

        def asleep():
            with open(f"/proc/{child}/cmdline") as words:
                return words.read().startswith("sleep")

        wait_until(asleep)
        parent.kill()
    wait_until(lambda: gone(child))


def test_a_child_whose_parent_died_before_the_leash_was_taken_does_not_start():
    words = leashed([sys.executable, "-c", "print('started')"])
    words[words.index("--") - 1] = "1"  # as if somebody else had started it
    found = subprocess.run(words, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, "")


def test_a_leashed_command_is_the_command():
    words = leashed([sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b"])
    found = subprocess.run(words, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (7, "['a b']\n")
