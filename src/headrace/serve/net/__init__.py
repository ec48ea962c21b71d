"""Connections, and who may use them: sockets, bodies within limits, keys, the event streams' ends.

listening    sockets and certificates;  protocol: what a connection may do
front        what stands before the routes;  keys, callers: on whose behalf a request runs
http         bodies read, events sent;  desk: who is being served, and how that ends early
"""
