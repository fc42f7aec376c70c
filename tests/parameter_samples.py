"""Which of a test's parameters a quick run takes."""

from collections.abc import Iterable


def sampled(functions: Iterable[str], every: int) -> list[int]:
    """Indices of the items to keep, one of ``every`` of each function and at least one.

    ``functions`` has the function of each item, in order. Of the first ``every`` items of one it
    is the first that is kept, of the next ones the second, and so on: a plain stride would meet
    the same few values of an inner parameter again and again.
    """
    seen: dict[str, int] = {}
    kept = []
    for index, function in enumerate(functions):
        count = seen.get(function, 0)
        seen[function] = count + 1
        turn, place = divmod(count, every)
        if place == turn % every:
            kept.append(index)
    return kept
