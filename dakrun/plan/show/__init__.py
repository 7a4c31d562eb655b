"""Plans for people and scripts.

overview.py computes all that is shown, json.py writes it for scripts, table.py for people, below
the three lines of answer.py; plot.py draws a plan with the parts in picture.py. rich and matplotlib
are imported when they are needed.
"""
