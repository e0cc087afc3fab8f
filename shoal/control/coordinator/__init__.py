"""The job's control server: it feeds what it hears to `membership`, writes the journal, then tells everybody.

Killed at any time, another one on the same directory goes on from the journal, or from what workers and launcher say if
there is none. Each file imports only from those above it:

telling      what was decided, to workers and launchers
decisions    what was heard changes the membership; the journal, then the event log, then telling
streams      who is served, and until when
workers      what they say
launchers    what they say
commands     what people ask for
server       all of it at one address
"""
