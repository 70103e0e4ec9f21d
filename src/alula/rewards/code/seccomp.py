"""The system call filter of sandboxed programs: threads, but no further process; no kernel interface beyond files."""

import errno
import platform
import struct

from alula.errors import SettingError

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_DENIED = {
    # name: (x86_64, aarch64); None where the architecture has no such call
    "fork": (57, None),
    "vfork": (58, None),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_send_signal": (424, 424),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97),
    "setns": (308, 268),
    "chroot": (161, 51),
    "pivot_root": (155, 41),
    "mount": (165, 40),
    "umount2": (166, 39),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # kernel interfaces with a history of bugs, or for administrators only
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "personality": (135, 92),
    "syslog": (103, 116),
    "kexec_load": (246, 104),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "swapon": (167, 224),
    "reboot": (169, 142),
}
_CLONE, _CLONE3, _SOCKET = (56, 220), (435, 435), (41, 198)

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_CLONE_THREAD, _AF_UNIX, _X32 = 0x10000, 1, 0x40000000
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _fail(code: int) -> int:
    return 0x00050000 | code


def seccomp_filter(machine: str | None = None) -> bytes:
    """The BPF program for `bwrap --seccomp`. Denied calls fail with EPERM, unknown ways to create a process with
    ENOSYS (libc then uses clone, whose flags can be read)."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise SettingError(
            f"reward code: the sandbox has no system call filter for {machine} (known: {', '.join(_ARCHITECTURES)}); "
            "give the address of a SandboxFusion server as the option url."
        )
    column = list(_ARCHITECTURES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, _ARCHITECTURES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        *_when(_AT_LEAST, _X32, [(_RETURN, 0, 0, _fail(errno.ENOSYS))]),
        *_when(_EQUAL, _CLONE3[column], [(_RETURN, 0, 0, _fail(errno.ENOSYS))]),
        *_when(_EQUAL, _CLONE[column], _only_if(_ANY_BIT, _CLONE_THREAD)),
        *_when(_EQUAL, _SOCKET[column], _only_if(_EQUAL, _AF_UNIX)),
    ]
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            program += _when(_EQUAL, number, [(_RETURN, 0, 0, _fail(errno.EPERM))])
    program.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


Instruction = tuple[int, int, int, int]


def _when(test: int, value: int, block: list[Instruction]) -> list[Instruction]:
    """Run the block, which must return, if the loaded value passes the test; else skip it."""
    return [(test, 0, len(block), value), *block]


def _only_if(test: int, value: int) -> list[Instruction]:
    """Allow the call if its first argument passes the test, else EPERM."""
    allow, deny = (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _fail(errno.EPERM))
    return [(_LOAD, 0, 0, _FIRST_ARGUMENT), *_when(test, value, [allow]), deny]
