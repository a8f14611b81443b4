"""Imported last by a server that processes fork from: what it has imported by then is no matter for collections.

A collection of garbage in such a process would look at a million objects of modules, in 0.3 seconds, and by that copy the
memory that it shares with the server.
"""

import gc

gc.collect()
gc.freeze()
