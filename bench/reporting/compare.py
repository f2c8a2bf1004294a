"""Says what changed between two runs beyond the noise."""
import os
import statistics

from .results import NOISE, OTHER_RUN, PEERS, YARDSTICKS, Results


def compare(a, b, noise=OTHER_RUN):
    """Prints what of the library became slower or faster from a to b. Returns 1 where something became slower or no longer works, else 0,
    and 2 where nothing can be compared."""
    for directory in (a, b):
        if not os.path.isdir(directory):
            print(f"error: no directory {directory}")
            return 2
    old, new = Results(a), Results(b)
    if old.gpu() != new.gpu():
        print(f"Not the same GPU: {old.gpu()} and {new.gpu()}.")
    machine, ours, peers, broken = [], [], [], []
    one = lambda results: {(row.file, row.op, row.case, row.who): row for row in results.rows}
    before, after = one(old), one(new)
    for key in before.keys() & after.keys():
        x, y = before[key], after[key]
        if y.error and not x.error and x.who not in PEERS:
            broken.append(f"{'/'.join(key[1:])}: {y.error}")
        if not x.us or not y.us:
            continue
        # Both medians move by their spread; where a file has none, the bound for different runs stands alone.
        bound = max(noise, 3 * (x.spread + y.spread))
        kind = machine if x.who in YARDSTICKS else peers if x.who in PEERS else ours
        kind.append((y.us / x.us, bound, "/".join(key[1:]), x.us, y.us))
    if not ours:
        print("error: the two have no case of the library in common")
        return 2
    if machine:
        middle = statistics.median(ratio for ratio, *_ in machine)
        print(f"The machine: yardsticks take {middle:.3f} times as long (median of {len(machine)})"
              + (". What moves with them is not the library's." if abs(middle - 1) > NOISE else "."))
    slower = show("slower", [change for change in sorted(ours, reverse=True) if change[0] > 1 + change[1]])
    show("faster", [change for change in sorted(ours) if change[0] < 1 - change[1]])
    show("a peer slower", [change for change in sorted(peers, reverse=True) if change[0] > 1 + change[1]], most=5)
    show("a peer faster", [change for change in sorted(peers) if change[0] < 1 - change[1]], most=5)
    for line in broken:
        print(f"no longer works: {line}")
    for what, found in (("only in " + a, before.keys() - after.keys()), ("only in " + b, after.keys() - before.keys())):
        if found:
            print(f"{what}: {len(found)} cases, of {', '.join(sorted({key[0] for key in found}))}")
    for results in (old, new):
        if results.unsteady:
            print(f"{results.directory}: {len(results.unsteady)} unsteady cases are left out")
    print(f"{len(ours)} cases of the library compared; median {statistics.median(ratio for ratio, *_ in ours):.3f} of the time before; "
          f"beyond the noise: {slower} slower, {len(broken)} that no longer work.")
    return 1 if slower or broken else 0


def show(what, changes, most=40):
    for ratio, bound, name, x, y in changes[:most]:
        print(f"{what}: {name}: {x:.2f} us, now {y:.2f} ({ratio:.3f}, the noise is {bound:.3f})")
    if len(changes) > most:
        print(f"{what}: and {len(changes) - most} more")
    return len(changes)
