"""The cold tier: copies of contexts in Redis, written and read by the verifier itself, straight into the pool.

forms.py      what a copy is made of: named arrays of bytes, and the facts of the context
chunks.py     a chunk's frame: whose it is, which one, and the checksum of its payload
bulk.py       chunks over sockets, without a copy between the socket and the pool
transfer.py   many chunks over several connections, with one deadline
tier.py       publish, find, restore, delete, touch
costs.py      which way to a context is the cheapest, from what was measured
"""
