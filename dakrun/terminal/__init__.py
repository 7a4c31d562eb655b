"""What a run shows in the terminal: progress.py while it goes on, summary.py when it has ended.

Knows numbers and the JSON of a report; knows neither engine nor files.
"""
