"""Where threads of one program might read what another of them has overwritten, found in compiled PTX.

A program's threads run side by side: only a barrier (``bar.sync``) puts one thread's accesses before another's. A
thread may write where it has read itself, which its own order settles. Anything else that was read since the last
barrier may be another thread's to write.
"""

import re

BARRIERS = ("bar.sync", "barrier.sync")

_STATEMENT = re.compile(r"(?:@(?P<guard>!?%p\d+)\s+)?(?P<operation>[a-z][\w.:]*)\s*(?P<operands>[^;]*);")
_ADDRESS = re.compile(r"\[\s*(%\w+)\s*(?:\+\s*(-?\d+))?\s*\]")
_REGISTER = re.compile(r"%\w+")


def statements_of(ptx):
    """``(guard, operation, operands)`` of a kernel's statements in order, and where its labels are."""
    body = ptx[ptx.index(".entry") :]
    body = body[body.index("\n{") :]
    statements, labels = [], {}
    for line in body.splitlines():
        line = line.split("//")[0].strip()
        label = re.match(r"(\$\w+):", line)
        if label:
            labels[label[1]] = len(statements)
        match = _STATEMENT.search(line.strip("{} ") if not line.startswith("@") else line)
        if match and not line.startswith("."):
            statements.append((match["guard"], match["operation"], match["operands"]))
    return statements, labels


def _registers_from(statements, parameter):
    """The registers that hold addresses computed from a pointer given to the kernel."""
    derived = set()
    for _ in statements:
        before = len(derived)
        for _, operation, operands in statements:
            result, _, sources = operands.partition(",")
            if operation.startswith("ld.param"):
                comes = re.search(rf"_param_{parameter}\]", operands) is not None
            else:
                comes = not operation.startswith(("ld.", "st.", "setp")) and bool(
                    derived.intersection(_REGISTER.findall(sources))
                )
            if comes:
                derived.add(result.strip())
        if len(derived) == before:
            break
    return derived


def unordered_accesses(ptx, parameter=0):
    """The statements that write through a pointer while others' reads through it may not have happened yet."""
    statements, labels = statements_of(ptx)
    pointers = _registers_from(statements, parameter)
    reads, writes = {}, {}
    for i, (_, operation, operands) in enumerate(statements):
        address = _ADDRESS.search(operands)
        if address and address[1] in pointers and operation.startswith(("ld.global", "st.global")):
            (reads if operation.startswith("ld") else writes)[i] = f"{address[1]}+{address[2] or 0}"
    assert reads, "the kernel reads nothing through this pointer"
    own = set(writes.values())

    # Addresses read since the last barrier, before each statement; from the ways that lead to it.
    pending = {0: set()}
    waiting = [0]
    while waiting:
        i = waiting.pop()
        if i == len(statements):
            continue
        guard, operation, operands = statements[i]
        after = set() if operation.startswith(BARRIERS) else pending[i] | ({reads.get(i)} - {None})
        following = []
        if operation.startswith("bra"):
            following.append(labels[operands.strip()])
        if operation != "ret" and not (operation.startswith("bra") and guard is None):
            following.append(i + 1)
        for j in following:
            if j not in pending or not after <= pending[j]:
                pending[j] = pending.get(j, set()) | after
                waiting.append(j)
    return [(address, sorted(pending[i] - own)) for i, address in writes.items() if pending[i] - own]
