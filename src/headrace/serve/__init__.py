"""Floor 7: the server. Owes: checked requests, error shapes, streaming, metrics. Knows no back ends.

process      binds, starts the engine, serves, drains          (the only file that starts anything)
app          the table of routes
errors       what went wrong, in the shape that the clients of a path read
net          connections, and who may use them
api          what clients may ask, and how it is answered
watch        what is told of the work
"""
