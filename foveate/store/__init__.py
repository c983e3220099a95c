"""Redis as Foveate uses it: deadlines on every call, a breaker, framed records, one place for keys and scripts.

Redis is never needed for an answer to be right. Whatever it does (slow, gone, full, lying), callers get `Unreachable`,
`Full` or `Corrupt` within their deadline, and go on without it.
"""
