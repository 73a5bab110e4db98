"""Run a command on an emulated host.

    python inside.py NAMESPACE_FD HOSTNAME HOSTS COMMAND...

Enters the network namespace, and runs the command with a separate host name, /etc/hosts (the text HOSTS) and
process ids. The exit code is the command's (128 + n if signal n ended it). Signals to this process group are
forwarded once to the command's group. When the command or the parent of this program ends, all processes
started by the command end, too, because the kernel ends a process id namespace with its init.

The file only needs the standard library, and runs by its path, so that a node need not import JAX.
"""

import ctypes
import os
import signal
import socket
import sys
import tempfile
from contextlib import suppress

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_MS_BIND, _MS_REC, _MS_PRIVATE, _PR_SET_PDEATHSIG = 4096, 16384, 1 << 18, 1
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str | None, flags: int) -> None:
    """Call mount(2).

    Raises:
        OSError: it failed.
    """
    kind_bytes = kind.encode() if kind else None
    if _libc.mount(source.encode(), target.encode(), kind_bytes, ctypes.c_ulong(flags), None):
        number = ctypes.get_errno()
        raise OSError(number, f"mounting {target}: {os.strerror(number)}")


def main(arguments: list[str]) -> int:
    """Enter the namespace, run the command, return its exit code."""
    namespace, hostname, hosts, *command = arguments
    os.setns(int(namespace), os.CLONE_NEWNET)
    os.close(int(namespace))
    os.unshare(os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWPID)
    socket.sethostname(hostname)
    mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    with tempfile.NamedTemporaryFile("w") as file:  # a mounted file no longer needs its name
        file.write(hosts)
        file.flush()
        os.fchmod(file.fileno(), 0o644)
        mount(file.name, "/etc/hosts", None, _MS_BIND)
    # The command may run, and be signalled, before this process does anything after the fork.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    init = os.fork()
    if init == 0:
        os._exit(_init(command))
    for number in FORWARDED:  # init is in the same process group and receives them itself
        signal.signal(number, lambda *_: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    return _exit_code(os.waitpid(init, 0)[1])


def _init(command: list[str]) -> int:
    """Process 1 of the node: start the command, forward signals, reap children, and end with the command.

    The signals must be blocked at the start.
    """
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    mount("proc", "/proc", "proc", 0)
    child = os.fork()
    if child == 0:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
        try:
            os.execvp(command[0], command)
        except OSError as error:
            print(f"cannot run {command[0]}: {error.strerror}", file=sys.stderr, flush=True)
            os._exit(127)
    for number in FORWARDED:
        signal.signal(number, lambda number, _: _signal_group(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            return _exit_code(status)


def _signal_group(leader: int, number: int) -> None:
    try:
        os.killpg(leader, number)
    except ProcessLookupError:  # the group does not exist yet, or has already ended
        with suppress(ProcessLookupError):  # and its leader with it
            os.kill(leader, number)


def _exit_code(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
