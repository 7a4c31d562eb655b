"""Memory tiers: HBM, page-locked host memory and peer GPUs. Only this folder allocates them.

tiers.py has the tiers, matrix.py matrices that lie in several; device.py GPU memory and peer
access; host.py pages of host memory; limits.py how much host memory there is (without importing
torch).
"""

from typing import TYPE_CHECKING

from dakrun.memory.limits import (
    HostLimit,
    available_host_memory,
    cgroup_limit,
    check_host_memory,
    check_threads,
    host_limits,
    lock_limit,
    node_memory,
    numa_node,
    numa_nodes,
    pci_address,
    unused_ram,
    usable_cores,
)

if TYPE_CHECKING:
    from dakrun.memory.device import (
        DeviceBlock,
        check_free,
        check_peer,
        device_index,
        device_view,
        enable_peer_access,
        free_on_peers,
        peer_index,
        upload,
    )
    from dakrun.memory.host import HostBlock, check_page_locking, locked_block
    from dakrun.memory.matrix import MatrixPart, TieredMatrix
    from dakrun.memory.tiers import (
        ALIGNMENT,
        HOST,
        Tier,
        Tiers,
        aligned,
        allocate_tiers,
    )

__all__ = [
    "ALIGNMENT",
    "HOST",
    "DeviceBlock",
    "HostBlock",
    "HostLimit",
    "MatrixPart",
    "Tier",
    "TieredMatrix",
    "Tiers",
    "aligned",
    "allocate_tiers",
    "available_host_memory",
    "cgroup_limit",
    "check_free",
    "check_host_memory",
    "check_page_locking",
    "check_peer",
    "check_threads",
    "device_index",
    "device_view",
    "enable_peer_access",
    "free_on_peers",
    "host_limits",
    "lock_limit",
    "locked_block",
    "node_memory",
    "numa_node",
    "numa_nodes",
    "pci_address",
    "peer_index",
    "unused_ram",
    "upload",
    "usable_cores",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import the modules that need torch when one of their names is first used."""
        if name in __all__:
            from importlib import import_module

            for module in ("tiers", "device", "host", "matrix"):
                found = vars(import_module(f"{__name__}.{module}"))
                if name in found:
                    return found[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
