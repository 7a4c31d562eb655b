"""Plans for the machine at hand: budgets that are not given are the memory that is free."""

from dataclasses import dataclass, replace
from typing import Literal

import torch

from dakrun.config import ModelConfig, Workload, model_len
from dakrun.hardware import HardwareProfile
from dakrun.memory import available_host_memory, free_on_peers
from dakrun.plan import ExpectedRun, Plan, Policy, choose_batch_size, make_plan


@dataclass(frozen=True)
class MachinePlanner:
    """Plans of a model on `device`, which `profile` describes; see LLM for the other arguments."""

    config: ModelConfig
    profile: HardwareProfile
    device: torch.device
    batch_size: int | Literal["auto"]
    max_batch_size: int
    max_decode_step: float | None
    max_model_len: int | None
    expected_tokens: int
    expected_prompt: int | None
    expected_run: ExpectedRun | None

    def plan(self, policy: Policy) -> Plan:
        """The plan under `policy`; budgets that it leaves open are the free memory.

        Raises CannotRun if the budgets are too small.
        """
        workload, run = self._workload(), self.expected_run
        limit = self.max_batch_size
        if run is not None:
            limit = min(limit, max(1, run.requests))
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
        if self.batch_size == "auto":
            room = policy
            if shared:
                room = replace(policy, hbm_budget=local // 2, host_budget=host // 2)
            workload = choose_batch_size(
                self.config,
                workload,
                self.profile,
                room,
                limit=limit,
                max_decode_step=self.max_decode_step,
                run=run,
            )
        return make_plan(
            self.config,
            workload,
            self.profile,
            policy,
            run=run,
            max_decode_step=self.max_decode_step,
        )

    def free_memory(self) -> tuple[int, int]:
        """Free bytes of the local tier, those of the CUDA context included, and of the host."""
        host = available_host_memory()
        if self.device.type == "cpu":
            return host, host
        return torch.cuda.mem_get_info(self.device)[0] + self.profile.context_bytes, host

    def _workload(self) -> Workload:
        """The workload; with a batch size to be chosen, that of one request."""
        length = model_len(self.config, self.max_model_len)
        new_tokens, prompt_len = self.expected_tokens, self.expected_prompt
        if self.expected_run is not None and self.expected_run.requests:
            new_tokens = max(1, round(self.expected_run.mean_new))
            prompt_len = max(1, round(self.expected_run.mean_prompt))
        new_tokens = min(new_tokens, max(1, length - 1))
        return Workload(
            batch_size=1 if self.batch_size == "auto" else self.batch_size,
            prompt_len=prompt_len or max(1, (length - new_tokens) // 2),
            new_tokens=new_tokens,
            max_model_len=length,
        )
