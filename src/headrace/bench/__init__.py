"""Floor 7: how fast it is. Owes: measurements whose numbers can be compared, each a function from what is asked to a
plain dictionary; the commands of `headrace bench` only read flags and show. Does not know: the command line.
"""
