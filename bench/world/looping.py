"""Does an answer go round in circles?"""

from collections.abc import Sequence

MAX_PERIOD = 40  # tokens
MIN_COPIES = 3
MIN_REPEATED = 12  # tokens that the copies cover together: "the the the" alone is no loop


def repeats(token_ids: Sequence[int]) -> bool:
    """Whether some block of at most MAX_PERIOD tokens stands MIN_COPIES times or more in direct succession."""
    for period in range(1, MAX_PERIOD + 1):
        needed = max(MIN_COPIES * period, MIN_REPEATED) - period
        run = 0
        for index in range(period, len(token_ids)):
            run = run + 1 if token_ids[index] == token_ids[index - period] else 0
            if run >= needed:
                return True
    return False
