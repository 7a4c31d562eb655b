"""`dakrun profile`: measures this machine for the planner.

run.py goes from options to a saved profile. gpu.py measures a GPU with the sweeps of sweeps.py, as
thoroughly as effort.py says. kernel_costs.py measures the kinds of costs that are asked for, with
the sweeps of gemm_costs.py, attention_costs.py and expert_costs.py. congestion.py fits a profile's
figures to sweeps. cpu.py measures a CPU. table.py and plot.py show a profile.
Importing this folder imports no torch.
"""
