"""What is told of the server's work: metrics, log lines, traces, and where a request's time went.

metrics      times as they pass;  snapshot: the engine's own counts;  traffic: requests by route
accounts     a request's timings and cost;  tracing: the same as spans;  journal: as lines of the log
"""
