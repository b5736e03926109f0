"""What the sandbox asks of the Linux kernel: namespaces, a private root, loss of all privileges.

Called by `_sandbox_runner`, in a process that was started for it. Standard library only.
Invariants: every refusal of the kernel is an OSError that names the call; a new root shows the interpreter's own
directories, system libraries and a few devices, all read-only, and nothing else of the host; the host's `/proc` stays
mounted there until a call covers it with its own.
Needs Linux 5.12 (mount_setattr). Left out: seccomp filters, cgroups (memory is limited per process).
"""

import ctypes
import os
import struct
import sys
from collections.abc import Iterable

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x08000000, 0x10000000
CLONE_NEWPID, CLONE_NEWNET = 0x20000000, 0x40000000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH, SIGCHLD, SIGKILL = 2, 17, 9
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, AT_RECURSIVE, AT_FDCWD = 1, 2, 0x8000, -100
# The same numbers on all architectures.
SYS_PIDFD_OPEN, SYS_CLONE3, SYS_CLOSE_RANGE, SYS_MOUNT_SETATTR = 434, 435, 436, 442
MFD_CLOEXEC = 1
CAPABILITY_VERSION_3 = 0x20080522
NOBODY = 65534

DEVICES = ("null", "zero", "full", "random", "urandom")
DEVICE_LINKS = {"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2", "shm": "/tmp"}
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
ETC = ("alternatives", "fonts", "group", "hosts", "ld.so.cache", "localtime", "mime.types", "nsswitch.conf", "passwd")
ETC_NETWORK = ("resolv.conf", "ssl/certs", "pki/tls/certs")

# PyDLL keeps the interpreter's lock, so that a process made by clone3 still holds it.
LIBC = ctypes.PyDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise OSError with errno when a C call returned a negative number."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def prctl(option: int, value: int) -> None:
    check(LIBC.prctl(option, value, 0, 0, 0), f"prctl({option})")


def pidfd_open(pid: int) -> int:
    """As in `os`, which has it only where Python was built with new headers (conda's is not)."""
    return check(LIBC.syscall(SYS_PIDFD_OPEN, pid, 0), "pidfd_open")


def memory_file() -> int:
    """Descriptor of an empty file in memory (`os.memfd_create`, see `pidfd_open`)."""
    return check(LIBC.memfd_create(b"sandbox", MFD_CLOEXEC), "memfd_create")


def clone(flags: int) -> int:
    """Fork into new namespaces. The child must fork again with `os.fork` before it runs anything of consequence."""
    args = struct.pack("8Q", flags, 0, 0, 0, SIGCHLD, 0, 0, 0)
    return check(LIBC.syscall(SYS_CLONE3, args, len(args)), "clone3")


def unshare(flags: int) -> None:
    check(LIBC.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    encoded = (None if text is None else text.encode() for text in (source, target, kind))
    result = LIBC.mount(*encoded, ctypes.c_ulong(flags), None if data is None else data.encode())
    check(result, f"mount {target}")


def set_mount_flags(path: str, add: int, clear: int = 0, recursive: bool = True) -> None:
    attributes = struct.pack("4Q", add, clear, 0, 0)
    flags = AT_RECURSIVE if recursive else 0
    result = LIBC.syscall(SYS_MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))
    check(result, f"mount_setattr {path}")


def close_from(first: int) -> None:
    """Close all descriptors from `first` on; in one call where the kernel has it."""
    if LIBC.syscall(SYS_CLOSE_RANGE, first, ctypes.c_uint(-1), 0) < 0:
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))


def drop_capabilities() -> None:
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    check(LIBC.capset(header, struct.pack("6I", *[0] * 6)), "capset")


def become_nobody() -> None:
    """Give up root for good: other users' files are out of reach, and the process limit binds."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    prctl(PR_SET_DUMPABLE, 1)  # the change of user cleared it, and with it the access to our own /proc/self


def may_become_nobody() -> bool:
    """Whether `become_nobody` works here: in a container root may lack the right, or the user may not exist. Forks."""
    pid = os.fork()
    if pid == 0:
        try:
            become_nobody()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(pid, 0)[1] == 0


def interpreter_paths() -> set[str]:
    """Directories the running interpreter and its packages live in, as named and with links resolved."""
    named = {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}
    return named | {os.path.realpath(path) for path in named}


def readable_by_anyone(paths: Iterable[str]) -> bool:
    """Whether every directory down to each path may be entered by any user."""
    for path in paths:
        while path != "/":
            if not os.stat(path).st_mode & 0o001:
                return False
            path = os.path.dirname(path)
    return True


def enter_user_namespace(flags: int = 0) -> None:
    """A new user namespace in which the present user is `nobody`, with all capabilities over what is made in it."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER | flags)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{NOBODY} {uid} 1"), ("gid_map", f"{NOBODY} {gid} 1")):
        write(f"/proc/self/{name}", text)


def write(path: str, text: str) -> None:
    """Unbuffered: on the way of every call."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def confine(hidden: Iterable[str]) -> None:
    """Move this process into a private root, as `nobody` in a user namespace of its own.

    `hidden`: directories that must not be seen even where they lie inside a directory that is shown.
    """
    if os.getuid() == 0:
        # Bind mounts first: nobody could not enter an interpreter that lives below root's home.
        unshare(CLONE_NEWNS)
        enter_private_root(hidden)
        become_nobody()
        enter_user_namespace()
    else:
        enter_user_namespace(CLONE_NEWNS)
        enter_private_root(hidden)
    prctl(PR_SET_DUMPABLE, 0)


def enter_private_root(hidden: Iterable[str]) -> None:
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    shown = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in _shown_paths()}
    root = "/tmp"  # only a place to stand on: everything shown was opened before it is covered
    mount("tmpfs", root, "tmpfs", MS_NOSUID, "mode=755")
    _link_system(root)
    for path in sorted({*shown, *hidden} - {"/"}, key=lambda path: path.count("/")):
        if path in shown:
            _bind(shown[path], root + path)
        elif os.path.isdir(root + path):
            mount("tmpfs", root + path, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=64k")
    for name, target in DEVICE_LINKS.items():
        os.symlink(target, f"{root}/dev/{name}")
    os.makedirs(root + "/tmp", exist_ok=True)  # it exists when the interpreter lives below /tmp
    set_mount_flags(root, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID)
    # A read-only view of /proc would be all that calls could mount later.
    set_mount_flags(root + "/proc", 0, MOUNT_ATTR_RDONLY, recursive=False)
    for descriptor in shown.values():
        os.close(descriptor)
    os.chdir(root)
    check(LIBC.pivot_root(b".", b"."), "pivot_root")
    check(LIBC.umount2(b".", MNT_DETACH), "umount2")
    os.chdir("/")


def _shown_paths() -> list[str]:
    etc = [f"/etc/{name}" for name in (*ETC, *ETC_NETWORK)]
    devices = [f"/dev/{name}" for name in DEVICES]
    directories = [path for path in SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    return [*directories, *interpreter_paths(), *filter(os.path.exists, etc), *devices, "/proc"]


def _link_system(root: str) -> None:
    """Links such as /bin -> usr/bin are made again."""
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), root + path)


def _bind(source: int, target: str) -> None:
    here = f"/proc/self/fd/{source}"
    if os.path.isdir(here):
        os.makedirs(target, exist_ok=True)
    elif not os.path.exists(target):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(here, target, None, MS_BIND | MS_REC)


def enter_call_root(size_mb: int) -> None:
    """In a call's own mount and pid namespaces: a /tmp of limited size, and a /proc that shows the call only.

    /tmp is empty but for an interpreter that lives there.
    """
    covered = {path: os.open(path, os.O_PATH) for path in interpreter_paths() if path.startswith("/tmp/")}
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={size_mb}m,nr_inodes=16384")
    for path, source in covered.items():
        _bind(source, path)
        os.close(source)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV)
    except PermissionError:  # containers that mask parts of /proc forbid a fresh one: none at all, then
        mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV, "mode=555,size=4k")


def give_up_everything() -> None:
    """Leave the namespaces' capabilities behind and make sure that none can be gained again."""
    unshare(CLONE_NEWUSER)  # the process limit counts per user namespace, so each call gets one
    limit = "/proc/sys/user/max_user_namespaces"
    if os.path.exists(limit):
        write(limit, "0")
    drop_capabilities()
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_DUMPABLE, 1)
