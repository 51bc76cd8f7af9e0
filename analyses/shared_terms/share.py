"""The terms that several populations share: significant in each with the same sign, at the mean of their sizes.

    python analyses/shared_terms/share.py digits-16.pop digits-32.pop fashion-16.pop fashion-32.pop > shared_start.py

Weights have the scale of torch's default initialisation; what starts at a constant there (norms) has the mean standard
deviation of the populations.
"""

import json
import sys

import numpy as np

from weightscope.fits.terms import explain
from weightscope.population import Population

CODE = '''"""Terms that all of these populations have, at the mean of their sizes: {names}."""

from weightscope.init import from_terms_

SCALES = {{
{scales}}}
TERMS = [
{terms}]


def start(module, *, generator, gain=1.0):
    return from_terms_(module, scales=SCALES, terms=TERMS, gain=gain, generator=generator)
'''


def main() -> None:
    names = sys.argv[1:]
    found = [explain(Population(name, partial=True), least=0.0) for name in names]
    each = [{(term.of, term.against, term.along, term.where): term for term in one.terms} for one in found]
    shared = [key for key in each[0] if all(key in other for other in each)]
    terms = []
    for key in shared:
        null = float(key[3] == "std")
        sides = {np.sign(own[key].low - null) + np.sign(own[key].high - null) for own in each}
        if sides in ({2.0}, {-2.0}):
            terms.append((*key, [float(f"{np.mean([np.mean(own[key].values) for own in each]):.3g}")]))
    scales = {}
    for pattern in found[0].scales:
        mean, std = 0.0, 1.0
        if ".norm" in pattern:
            mean = float(pattern.endswith("weight"))
            std = float(f"{np.mean([np.mean(one.scales[pattern][1]) for one in found]):.3g}")
        scales[pattern] = [mean], [std]
    print(
        CODE.format(
            names=", ".join(names),
            scales="".join(f"    {json.dumps(key)}: {value},\n" for key, value in scales.items()),
            terms="".join(f"    ({json.dumps(term)[1:-1]}),\n" for term in terms),
        ),
        end="",
    )
    print([len(one.terms) for one in found], "terms each,", len(shared), "in all,", len(terms), "kept", file=sys.stderr)


if __name__ == "__main__":
    main()
