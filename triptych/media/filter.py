"""Which system calls a media process may still make once it has started: those that computing takes, and no other.

It opens nothing, connects to nothing, starts nothing and signals nobody but itself; what else it tries fails with
EPERM. The filter is a program of the kernel's seccomp, which any process may load once it has given up new privileges
(docs/adr/0015-system-calls-of-media.md). The kernel runs it before each system call, over

    0  4  number of the call    4  4  architecture    8  8  instruction    16  6 x 8  arguments

and does what it returns. It only jumps ahead, by the two counts in each comparison: instructions to skip if it holds,
and if it does not.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from dataclasses import dataclass
from typing import Final

_PR_SET_SECCOMP: Final = 22
_SECCOMP_MODE_FILTER: Final = 2
_CLONE_THREAD: Final = 0x10000

# Instructions of classic BPF, and where what they look at lies: of arguments, the lower halves.
_LOAD, _IS_EQUAL, _HAS_BITS, _RETURN = 0x20, 0x15, 0x45, 0x06
_NUMBER, _ARCH, _ARGS = 0, 4, 16
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_REFUSE: Final = 0x00050000 | errno.EPERM
# Asked for by the C library, which then takes `clone`, whose flags can be looked at.
_NO_SUCH_CALL: Final = 0x00050000 | errno.ENOSYS


@dataclass(frozen=True, slots=True)
class _Machine:
    """`arch`: the kernel's number for it; `calls`: the numbers of its system calls, by name."""

    arch: int
    calls: dict[str, int]


def _table(text: str) -> dict[str, int]:
    words = text.split()
    return {name: int(number) for name, number in zip(words[::2], words[1::2], strict=True)}


# Those whose arguments are looked at; all others are free.
_LOOKED_AT: Final = frozenset({"clone", "clone3", "prlimit64", "tgkill"})
_MACHINES: Final = {
    "x86_64": _Machine(
        0xC000003E,
        _table("""
            read 0 write 1 close 3 fstat 5 poll 7 lseek 8 mmap 9 mprotect 10 munmap 11 brk 12 rt_sigaction 13
            rt_sigprocmask 14 rt_sigreturn 15 readv 19 writev 20 sched_yield 24 mremap 25 madvise 28 nanosleep 35
            getpid 39 sendto 44 recvfrom 45 shutdown 48 exit 60 gettimeofday 96 getrusage 98 sigaltstack 131 gettid 186
            time 201 futex 202 sched_getaffinity 204 set_tid_address 218 restart_syscall 219 clock_gettime 228
            clock_getres 229 clock_nanosleep 230 exit_group 231 ppoll 271 set_robust_list 273 getcpu 309 getrandom 318
            membarrier 324 rseq 334
            clone 56 clone3 435 prlimit64 302 tgkill 234
        """),
    ),
    "aarch64": _Machine(
        0xC00000B7,
        _table("""
            close 57 lseek 62 read 63 write 64 readv 65 writev 66 ppoll 73 fstat 80 exit 93 exit_group 94
            set_tid_address 96 futex 98 set_robust_list 99 nanosleep 101 clock_gettime 113 clock_getres 114
            clock_nanosleep 115 sched_getaffinity 123 sched_yield 124 restart_syscall 128 sigaltstack 132
            rt_sigaction 134 rt_sigprocmask 135 rt_sigreturn 139 getrusage 165 getcpu 168 gettimeofday 169 getpid 172
            gettid 178 sendto 206 recvfrom 207 shutdown 210 brk 214 munmap 215 mremap 216 mmap 222 mprotect 226
            madvise 233 getrandom 278 membarrier 283 rseq 293
            clone 220 clone3 435 prlimit64 261 tgkill 131
        """),
    ),
}


def forbid_system_calls() -> bool:
    """From here on, for all threads to come. False when this kernel or this kind of machine has no such filter.

    The process must have given up new privileges, and have one thread.
    """
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    program = _program(machine, os.getpid())
    code = ctypes.create_string_buffer(program, len(program))
    head = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.create_string_buffer(head), 0, 0) == 0)


def _program(machine: _Machine, pid: int) -> bytes:
    """Each pair asks one thing and returns when it is so."""
    calls = machine.calls
    free = [number for name, number in calls.items() if name not in _LOOKED_AT]
    # Numbers that mean something else for 32-bit programs come with another architecture, or (x32) with a bit that none
    # of ours has.
    return b"".join(
        [
            _op(_LOAD, _ARCH),
            _op(_IS_EQUAL, machine.arch, 1, 0),
            _op(_RETURN, _KILL),
            _op(_LOAD, _NUMBER),
            *(step for number in free for step in (_op(_IS_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW))),
            _op(_IS_EQUAL, calls["clone3"], 0, 1),
            _op(_RETURN, _NO_SUCH_CALL),
            *_when(calls["clone"], _op(_LOAD, _ARGS), _op(_HAS_BITS, _CLONE_THREAD, 0, 1)),
            *_when(calls["tgkill"], _op(_LOAD, _ARGS), _op(_IS_EQUAL, pid, 0, 1)),
            # Its own limit of CPU time, which is set anew for each picture.
            _op(_IS_EQUAL, calls["prlimit64"], 0, 5),
            _op(_LOAD, _ARGS),
            _op(_IS_EQUAL, 0, 0, 3),
            _op(_LOAD, _ARGS + 8),
            _op(_IS_EQUAL, resource.RLIMIT_CPU, 0, 1),
            _op(_RETURN, _ALLOW),
            _op(_RETURN, _REFUSE),
        ]
    )


def _when(call: int, load: bytes, test: bytes) -> tuple[bytes, ...]:
    """Allows the call when the test of its argument holds, and refuses it otherwise."""
    return (_op(_IS_EQUAL, call, 0, 4), load, test, _op(_RETURN, _ALLOW), _op(_RETURN, _REFUSE))


def _op(code: int, value: int, if_so: int = 0, if_not: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_so, if_not, value)
