"""Plans for the machine at hand: budgets that are not given are the memory that is free."""

from dataclasses import dataclass, replace

import torch

from dakrun.config import ModelConfig
from dakrun.hardware import HardwareProfile
from dakrun.memory.device import free_on_peers
from dakrun.memory.limits import available_host_memory
from dakrun.plan import Plan, Policy, RunOptions


@dataclass(frozen=True)
class MachinePlanner:
    """Plans of a model on `device`, described by `profile`, with all `options` but the policy."""

    config: ModelConfig
    profile: HardwareProfile
    device: torch.device
    options: RunOptions

    def plan(self, policy: Policy) -> Plan:
        """The plan under `policy`; budgets that it leaves open are the free memory.

        Raises CannotRun if the budgets are too small.
        """
        local, host = self.free_memory()
        remote = policy.remote_tiers(self.profile)
        # On a CPU both tiers are the same memory; its free bytes count once.
        given = (policy.hbm_budget, policy.host_budget)
        shared = self.device.type == "cpu" and given == (None, None) and len(remote) > 0
        peer = policy.peer_budget
        if peer is None and self.device.type == "cuda":
            peer = free_on_peers(remote, self.device)
        policy = replace(
            policy,
            hbm_budget=local if policy.hbm_budget is None else policy.hbm_budget,
            host_budget=host if policy.host_budget is None else policy.host_budget,
            peer_budget=peer,
        )
        choosing = policy
        if shared:
            choosing = replace(policy, hbm_budget=local // 2, host_budget=host // 2)
        options = replace(self.options, policy=policy)
        return options.plan(self.config, self.profile, choosing=choosing)

    def free_memory(self) -> tuple[int, int]:
        """Free bytes of the local tier, those of the CUDA context included, and of the host."""
        host = available_host_memory()
        if self.device.type == "cpu":
            return host, host
        return torch.cuda.mem_get_info(self.device)[0] + self.profile.context_bytes, host
