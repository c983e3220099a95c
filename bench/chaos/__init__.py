"""Real processes, real Redis, real faults, answers under load.

private     a mount namespace of its own: a /dev/shm and a disk that may be filled
clocks      wall clocks that jump (shifted_clock is imported by the services' Python, not by them)
world       the services, killed and started again at the same addresses, with a proxy before each
faults      everything that is done to them
asking      clients that do what docs/clients.md says, and compare
__main__    the run and its counts
"""
