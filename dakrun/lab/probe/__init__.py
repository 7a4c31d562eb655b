"""`dakrun profile`: measures this machine for the planner.

run.py goes from options to a saved profile. gpu.py measures a GPU: with the sweeps of sweeps.py and
the costs of gemm_costs.py, attention_costs.py and expert_costs.py, of which kernel_costs.py takes
those that are asked for, as thoroughly as effort.py says. congestion.py makes a profile's figures
of these. cpu.py measures a CPU. table.py and plot.py show a profile.
Importing this folder imports no torch.
"""
