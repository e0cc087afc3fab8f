"""Who is in: a state machine over frozen values. Events and `now` go in, the next state and instructions come out.

An edge (the coordinator) feeds every event that waits to an `on_…` function, then calls `settle` once, so that several
changes become one generation. Nothing here reads a clock or knows a socket. Each file imports only from those above it:

values      workers, hosts and what the job has come to
workers     come and go
target      how many there are to be
finishing   the job ends, or is stopped
hosts       come, change, and are lost or refused
failures    of code, connections and states
liveness    who is silent is probed, then fenced
settling    what has changed becomes one generation
"""
