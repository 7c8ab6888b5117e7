"""This process as one of the ranks of a run: its device, and its connection to the other ranks.

Ranks on several hosts connect over the network interface that reaches the other hosts, and ranks on one host over
loopback.
"""

import datetime
import fcntl
import functools
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

# torch.distributed.checkpoint imports this module, whose functions have a default argument: the process group at the
# time of the import. A real group would keep its threads alive, which might abort the interpreter at exit. Therefore
# the module is imported before there is a group.
import torch.distributed.nn.functional
from torch.distributed import ProcessGroup

from shardwise.core.communication.context import backends_of
from shardwise.core.errors import ConfigError, LaunchError, TopologyError
from shardwise.core.processes import STORE_VARIABLE, loopback_interface, machine
from shardwise.core.sockets import own_inodes, refuse_strangers
from shardwise.run.processes.watch import BeatFiles, Watch
from shardwise.training.bounds import DEFAULT_TIMEOUT, launcher_number

# Ranks start at different times, because imports may be read from a slow disk.
_JOINING_SECONDS = 600.0
_HOST_LIMIT = datetime.timedelta(days=1)
_BEAT_LIMIT = datetime.timedelta(seconds=5)
_STREAM_LIMIT = datetime.timedelta(hours=1)
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Linux's ioctl request for the address of an interface, and the position of the address in the answer.
_SIOCGIFADDR = 0x8915
_ADDRESS = slice(20, 24)

OVERLAP_VARIABLES = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCH_NCCL_HIGH_PRIORITY": "1"}
"""Environment variables that let collectives overlap with products: a single queue, which keeps the order of launches,
and high-priority streams for NCCL's kernels, which otherwise wait until a product leaves room."""


# PyTorch's names of one setting, the current one first.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks.

    Attributes:
        rank, world_size: global rank, and number of ranks.
        local_rank: rank among the ranks of this machine.
        device: device of this rank.
        why_device: reason for the choice of the device.
        own_control: process group of all ranks on the CPU, if ``world`` is on another device.
        watch: watchdog of this rank's waits; None for a single rank.
    """

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    own_control: ProcessGroup | None = None
    watch: Watch | None = None
    why_device: str = ""

    @property
    def world(self) -> ProcessGroup:
        """Process group of all ranks, on their devices."""
        group = dist.group.WORLD
        assert group is not None
        return group

    @property
    def control(self) -> ProcessGroup:
        """Process group of all ranks for agreements; its timeout is a day, because a rank may take hours."""
        return self.world if self.own_control is None else self.own_control

    def phase(self, doing: str, *, limited: bool = False) -> AbstractContextManager[None]:
        """Return a context that sets what this rank is ``doing``, for messages; see ``Watch.phase``."""
        return nullcontext() if self.watch is None else self.watch.phase(doing, limited=limited)

    @property
    def is_first(self) -> bool:
        """True on rank 0, which writes the files and messages of the run."""
        return self.rank == 0

    def on_first(self, callback: Callable[[Any], object] | None) -> Callable[[Any], object]:
        """Return ``callback`` on the first rank, and a function that does nothing on other ranks or for None."""
        return callback if callback is not None and self.is_first else lambda _: None


@contextmanager
def open_ranks(
    device: Literal["auto", "cpu", "cuda"], *, timeout: float = DEFAULT_TIMEOUT, overlaps: bool = False
) -> Iterator[Ranks]:
    """Join the other ranks for the duration of the block.

    The launcher (``shardwise``, torchrun) sets RANK and WORLD_SIZE. Without them this is the only rank. Without its
    LOCAL_WORLD_SIZE, the ranks compare their hosts. Without other hosts, ranks connect over loopback during the block,
    even if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME has another interface.

    Args:
        device: device to compute on; "auto" takes a GPU if there is one for each rank of this machine.
        timeout: maximum seconds to wait for another rank in a step, and for a silent rank at any time; see ``Watch``.
        overlaps: True if collectives will overlap with products on a GPU; see ``prepare_overlap``.

    Raises:
        ConfigError: there is no GPU for this rank, another rank has the same GPU, or this process is already in a
            process group.
        LaunchError: the other ranks cannot be reached or do not arrive.
    """
    if dist.is_initialized():
        raise ConfigError(
            "this process has joined a process group already, and a function of shardwise.run joins its own; "
            "call it before torch.distributed.init_process_group or after destroy_process_group"
        )
    world_size, rank = launcher_number("WORLD_SIZE", least=1) or 1, launcher_number("RANK") or 0
    joining = datetime.timedelta(seconds=max(timeout, _JOINING_SECONDS))
    # One rank meets no others, even if something else left RANK=0 and WORLD_SIZE=1.
    has_launcher = world_size > 1 or {"RANK", "MASTER_ADDR"} <= os.environ.keys()
    store = meet(rank, world_size, joining) if has_launcher else dist.HashStore()  # type: ignore[attr-defined]  # not in its stubs
    # A store outlives its groups: a second call must not find the addresses of the first. Ranks make the same calls.
    opening = store.add(f"shardwise/calls/{rank}", 1)
    store = dist.PrefixStore(f"shardwise/call/{opening}", store)  # type: ignore[attr-defined]  # not in its stubs
    on_host = ranks_of_host(store, rank, world_size)
    local_rank, num_local = on_host.index(rank), len(on_host)
    if overlaps and device != "cpu" and torch.version.cuda is not None:
        prepare_overlap()
    where, why_device = choose_device(device, local_rank=local_rank, num_local=num_local)
    use_cuda = where.type == "cuda"
    if use_cuda:
        prepare_allocator()
        torch.cuda.set_device(where)
    with _over_loopback() if num_local == world_size else nullcontext():
        join(store, where, rank, world_size, on_host=on_host, timeout=joining)
        watch: Watch | None = None
        failed = False
        try:
            # The watchdog ends collectives at its limit, which differs between a step and the preparation. The timeouts
            # of the groups only cover waits that the watchdog cannot see.
            world = dist.group.WORLD
            assert world is not None
            limit = max(_STREAM_LIMIT if use_cuda else _HOST_LIMIT, datetime.timedelta(seconds=timeout))
            for device_type in backends_of(world):
                world._get_backend(torch.device(device_type))._set_default_timeout(limit)
            control = None
            if use_cuda and world_size > 1:
                with _without_strangers(dist.PrefixStore("shardwise/control", store), rank, world_size):  # type: ignore[attr-defined]
                    control = dist.new_group(backend="gloo", timeout=_HOST_LIMIT)
            if world_size > 1:
                watch = Watch(_beats(store, opening), rank, world_size, limit=timeout, waits_in_stream=use_cuda)
                watch.start()
            yield Ranks(rank, local_rank, world_size, where, control, watch, why_device)
        except BaseException:
            failed = True
            raise
        finally:
            if watch is not None:
                watch.stop()
            if failed and use_cuda:
                # Destroying waits for collectives that were launched on the device. They may never complete after a
                # failure, because this or another rank has left them.
                dist.distributed_c10d._abort_process_group()
            else:
                dist.destroy_process_group()


def prepare_overlap() -> None:
    """Set ``OVERLAP_VARIABLES``, except those that the user has set. Call it before CUDA starts."""
    for name, value in OVERLAP_VARIABLES.items():
        os.environ.setdefault(name, value)


def prepare_allocator() -> None:
    """Let PyTorch's allocator of GPU memory extend its segments, unless the user has configured it.

    Otherwise a block that is freed in a segment serves only requests that fit into it, and more memory is lost when
    sizes change from step to step. Call it before CUDA starts.

    Source: PyTorch's notes on CUDA, "Optimizing memory usage with PYTORCH_CUDA_ALLOC_CONF".
    """
    if not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        os.environ[_ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def why_no_gpu(num_local: int) -> str | None:
    """Return the reason why ``num_local`` ranks of this machine cannot have a GPU each; None if they can."""
    if torch.version.cuda is None and torch.version.hip is None and not torch.cuda.is_available():
        return "this PyTorch was built without CUDA"
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus == 0:
        return "PyTorch finds no GPU here: there is none, no driver, or CUDA_VISIBLE_DEVICES hides them"
    if num_gpus < num_local:
        return f"this machine has {_gpus(num_gpus)} for {num_local} ranks, and each rank needs one"
    return None


def choose_device(
    wanted: Literal["auto", "cpu", "cuda"], *, local_rank: int, num_local: int
) -> tuple[torch.device, str]:
    """Return the device of a rank and the reason for the choice.

    Args:
        wanted: "auto" takes a GPU if there is one for each rank of this machine. With "cuda", a rank may also see only
            one GPU, which its launcher reserved for it.
        local_rank, num_local: rank among the ranks of this machine, and their number.

    Raises:
        ConfigError: "cuda" is wanted and there is no GPU for this rank.
    """
    if wanted == "cpu":
        return torch.device("cpu"), "as asked for"
    refusal = why_no_gpu(num_local)
    if refusal is None:
        return torch.device("cuda", local_rank), "a GPU for each rank"
    if wanted == "auto":
        return torch.device("cpu"), refusal
    if torch.cuda.is_available() and torch.cuda.device_count() == 1:
        return torch.device("cuda", 0), "the only GPU that this rank sees"
    raise ConfigError(f"device is 'cuda', but {refusal}; start fewer ranks with --nproc, or use --device cpu")


def refuse_shared_gpus(store: Any, own_gpu: str, *, rank: int, on_host: Sequence[int]) -> None:
    """Raise ConfigError on every rank of this host if two of them have the same GPU: NCCL would fail or hang."""
    store.set(f"shardwise/gpu/{rank}", own_gpu)
    store.wait([f"shardwise/gpu/{peer}" for peer in on_host], datetime.timedelta(minutes=10))
    seen: dict[str, int] = {}
    for peer in on_host:
        gpu = store.get(f"shardwise/gpu/{peer}").decode()
        other = seen.setdefault(gpu, peer)
        if other != peer:
            raise ConfigError(
                f"ranks {other} and {peer} would share the GPU {gpu}, and NCCL needs one for each rank; start no more "
                "ranks than there are GPUs, or let each see another one (CUDA_VISIBLE_DEVICES)"
            )


def _gpus(number: int) -> str:
    return "1 GPU" if number == 1 else f"{number} GPUs"


def process_group_of(device: torch.device, num_ranks: int) -> dict[str, Any]:
    """Return the arguments of ``init_process_group`` for ``num_ranks`` ranks that compute on ``device``.

    On GPUs NCCL transfers tensors, and gloo transfers what hosts exchange without waiting for the GPUs. If it knows the
    device, NCCL creates communicators together with their groups, in the same order on all ranks. A single rank needs
    no communicators.
    """
    if device.type == "cpu":
        return {"backend": "gloo"}
    return {"backend": "cpu:gloo,cuda:nccl"} | ({"device_id": device} if num_ranks > 1 else {})


@contextmanager
def _over_loopback() -> Iterator[None]:
    """Let gloo and NCCL use the loopback interface in the block."""
    before, interface = {name: os.environ.get(name) for name in _INTERFACE_VARIABLES}, loopback_interface()
    if interface is not None:
        os.environ |= dict.fromkeys(_INTERFACE_VARIABLES, interface)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def meet(rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    """Return the store of the launcher's ranks: our launcher's file, or else PyTorch's at MASTER_ADDR.

    The first rank has PyTorch's store, or torchrun does; wait at most ``timeout`` for it.
    """
    if path := os.environ.get(STORE_VARIABLE):
        store: Any = dist.FileStore(path)  # type: ignore[attr-defined]  # not in its stubs
    else:
        _check_variables()
        with _joining(rank, world_size):
            store = _store_at(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), rank, world_size, timeout)
    store.set_timeout(timeout)
    return store


# The first rank's store answers the others until its process ends.
@functools.cache
def _store_at(address: str, port: int, rank: int, world_size: int, timeout: datetime.timedelta) -> Any:
    # torchrun has the store itself.
    has_store = rank == 0 and "TORCHELASTIC_RUN_ID" not in os.environ
    if has_store and _is_loopback_name(address):
        # PyTorch would listen on all interfaces.
        here = addresses_towards(address)[1]
        listening = socket.create_server((here, port), family=socket.AF_INET6 if ":" in here else socket.AF_INET)
        return dist.TCPStore(  # type: ignore[attr-defined]  # not in its stubs
            address, port, world_size, is_master=True, timeout=timeout, multi_tenant=True,
            master_listen_fd=listening.detach(),
        )  # fmt: skip
    return next(dist.rendezvous("env://", timeout=timeout))[0]  # type: ignore[attr-defined]  # not in its stubs


def _beats(store: Any, opening: int) -> Any:
    """Return where the watchdogs of this call keep their heartbeats, with a separate connection."""
    if path := os.environ.get(STORE_VARIABLE):
        return BeatFiles(Path(path).with_name(f"beats{opening}"))
    beats = dist.PrefixStore("shardwise/watch", store.clone())  # type: ignore[attr-defined]  # not in its stubs
    beats.set_timeout(_BEAT_LIMIT)
    return beats


def ranks_of_host(store: Any, rank: int, world_size: int) -> Sequence[int]:
    """Return the global ranks of this host: by the launcher's variables, or else those whose host is this one.

    Raises:
        ConfigError: a variable is not a number, or not less than the number of ranks of the host.
        LaunchError: a rank does not arrive.
    """
    local_rank, number = launcher_number("LOCAL_RANK") or 0, launcher_number("LOCAL_WORLD_SIZE", least=1)
    if number is not None and local_rank >= number:
        raise ConfigError(
            f"the environment has LOCAL_RANK={local_rank} and LOCAL_WORLD_SIZE={number}, but ranks of a host count "
            "from 0; unset both to have the ranks compare their hosts"
        )
    if number is not None or world_size == 1:
        return range(rank - local_rank, rank - local_rank + (number or local_rank + 1))
    with _joining(rank, world_size):
        store.set(f"shardwise/host/{rank}", machine() or socket.gethostname())
        hosts = [store.get(f"shardwise/host/{other}") for other in range(world_size)]
    return [other for other in range(world_size) if hosts[other] == hosts[rank]]


def join(
    store: Any, device: torch.device, rank: int, world_size: int, *, on_host: Sequence[int], timeout: datetime.timedelta
) -> None:
    """Call ``init_process_group``, over the interface that reaches the other hosts.

    By default gloo listens on the address of this host's name, on Debian the loopback address 127.0.1.1, which no other
    host can reach. Therefore, if there are several hosts, ``GLOO_SOCKET_IFNAME`` and ``NCCL_SOCKET_IFNAME`` are set to
    the interface if it is found and the user has not set them.
    """
    with _joining(rank, world_size):
        if len(on_host) < world_size:
            _choose_interface(store, rank, world_size)
        if device.type == "cuda" and world_size > 1:
            gpu = str(torch.cuda.get_device_properties(device).uuid)
            refuse_shared_gpus(store, gpu, rank=rank, on_host=on_host)
        with _without_strangers(store, rank, world_size):
            dist.init_process_group(
                **process_group_of(device, world_size), store=store, rank=rank, world_size=world_size, timeout=timeout
            )


@contextmanager
def _without_strangers(store: Any, rank: int, world_size: int) -> Iterator[None]:
    """In the block ranks connect; at its end all of them raise TopologyError if another user connected to one.

    The verdicts are texts in the store, since nothing may be read from the connections yet.
    """
    before = own_inodes()
    yield
    verdict = ""
    try:
        refuse_strangers(before)
    except TopologyError as error:
        verdict = str(error)
    store.set(f"shardwise/strangers/{rank}", verdict)
    for other in range(world_size):
        if said := store.get(f"shardwise/strangers/{other}").decode():
            raise TopologyError(said)


@contextmanager
def _joining(rank: int, world_size: int) -> Iterator[None]:
    """In the block, raise LaunchError if the others cannot be reached."""
    try:
        yield
    except (ConfigError, TopologyError):
        raise
    except (RuntimeError, ValueError, OSError) as error:
        if path := os.environ.get(STORE_VARIABLE):
            where, hint = path, ""
        else:
            where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
            hint = f"{_hint()}; if no launcher set RANK and WORLD_SIZE, unset them"
        raise LaunchError(f"rank {rank} of {world_size} could not join the others at {where}{hint}: {error}") from error


def _check_variables() -> None:
    """Check that MASTER_ADDR and MASTER_PORT are set; without them, RANK and WORLD_SIZE are not from a launcher."""
    ranks = f"RANK={os.environ.get('RANK')} and WORLD_SIZE={os.environ.get('WORLD_SIZE')}"
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    for name, value in (("MASTER_ADDR", address), ("MASTER_PORT", port)):
        if not value:
            raise ConfigError(
                f"the environment has {ranks} but no {name}, which a launcher sets too; unset RANK and WORLD_SIZE to "
                "have the ranks started here"
            )
    if not re.fullmatch(r"\d{1,5}", port or "") or not 0 <= int(port or 0) < 1 << 16:
        raise ConfigError(f"the environment has MASTER_PORT={port}, which is no port; a number from 0 to 65535 is")


def _hint() -> str:
    chosen = os.environ.get(_INTERFACE_VARIABLES[0])
    names = ", ".join(name for _, name in socket.if_nameindex())
    return (
        f" (through the network interface {chosen or 'that the name of this host points to'}; if other hosts are not "
        f"reached through that, set {_INTERFACE_VARIABLES[0]} to one of {names})"
    )


def _choose_interface(store: Any, rank: int, world_size: int) -> None:
    """Set the variables that the user has not set, if the interface that reaches the other hosts is found."""
    if all(os.environ.get(name) for name in _INTERFACE_VARIABLES):
        return
    here, there = addresses_towards(os.environ["MASTER_ADDR"])
    # If the master's name resolves to loopback on the master itself, the other hosts know which address they use.
    store.set(f"shardwise/master-address/{rank}", "" if is_loopback(there) else there)
    if is_loopback(here):
        seen = (store.get(f"shardwise/master-address/{other}").decode() for other in range(world_size))
        here = next(filter(None, seen), here)
    interface = interface_of(here)
    if interface is not None:
        for name in _INTERFACE_VARIABLES:
            os.environ.setdefault(name, interface)


def addresses_towards(host: str) -> tuple[str, str]:
    """Return the addresses of this host and of ``host`` on the route between them; nothing is sent.

    Raises:
        OSError: the host does not exist or cannot be reached.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as datagrams:
        datagrams.connect(address)
        return str(datagrams.getsockname()[0]), str(datagrams.getpeername()[0])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with ``address``; None if there is none or the system does not tell."""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if wanted in _addresses_of(name)), None)


def _addresses_of(interface: str) -> list[Any]:
    """Return the first IPv4 address and the IPv6 addresses of an interface, as far as Linux tells them."""
    found: list[Any] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            answer = fcntl.ioctl(asking, _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            found.append(ipaddress.ip_address(answer[_ADDRESS]))
        except OSError:
            pass
    try:
        with open("/proc/net/if_inet6", encoding="ascii") as table:
            rows = [line.split() for line in table]
    except OSError:
        return found
    return found + [ipaddress.ip_address(bytes.fromhex(row[0])) for row in rows if row[-1] == interface]


def _is_loopback_name(host: str) -> bool:
    """True if ``host`` is this host's name for itself, or its loopback address; a name of the host may be more."""
    try:
        return host == "localhost" or is_loopback(host)
    except ValueError:
        return False


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
