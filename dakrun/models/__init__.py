"""What a model is: its config.json and names, a table of its layers, and one forward pass.

architectures.py has the table, one row a family, which planner, loader and forward pass read.
decoder.py is the forward pass over a backend; hub.py and hf_config.py find and read a config.json.
"""
