r"""What weightscope reads of every family of timm and of model types of transformers, judged by their forward passes.

    python benchmarks/what_is_read.py --json benchmarks/results/what-is-read.json \
        --markdown benchmarks/results/what-is-read.md

One smallest variant of each module of timm, and each model type of transformers that can be built small, with random
weights. `tests/forward_truth.py`, which uses nothing of weightscope, sees the linear maps and the products of one
forward pass: what was read is **right** if the numbers that its matrices make meet there, head by head, and **wrong**
otherwise; **incomplete** if attention was computed that is neither read nor named as unread; **refused** with the
reason that weightscope gives; **absent** if there is nothing of the kind. Symmetries are right if renumbered networks
compute the same. At most three parts of each kind are judged in one model. An initialiser is right if an audit of its
structure fails before and not after; refused if it stopped with one line and changed nothing; "not judged" if the audit
cannot tell the untouched network, such as one with few heads.
"""

import argparse
import copy
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import forward_truth as truth
import small_models

import weightscope.init as wi
from weightscope import anatomy
from weightscope.anatomy.permutation_groups import apply_permutation, permutation_spec
from weightscope.auditing import audit
from weightscope.errors import AnatomyError, WeightscopeError

READ = ("attention", "MLPs", "filters", "symmetries")
SET = ("mimetic_attention", "mimetic_mlp", "zero_init", "t_fixup", "random_filters", "sinusoidal_positions")
KINDS = READ + SET
SECONDS, GIGABYTES = 40, 6  # of processor time to build a model and for each kind, of address space
MOST = 3  # parts of a kind that are judged in one model

Cell = dict[str, Any]


class Truth:
    """One forward pass of a model, in float64 if all its operations take that, and others with changes."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        for kind in (torch.float64, torch.float32):
            self.model = copy.deepcopy(model).to(kind)
            self.inputs = tree_map(
                lambda t, k=kind: t.to(k) if isinstance(t, torch.Tensor) and t.is_floating_point() else t, inputs
            )
            try:
                self.seen = self.again({}, None)
                break
            except RuntimeError:  # such as grouped products of float64
                if kind == torch.float32:
                    raise

    def again(self, nudges: dict[int, torch.Tensor], until: int | None) -> truth.Watch:
        """A pass with numbers of some linear maps changed, up to one of them."""
        return truth.watch(self.model, self.inputs, nudges, until)


def some(parts: Sequence[Any]) -> list[Any]:
    """At most `MOST` of them, evenly spaced."""
    return list(parts)[:: max(1, -(-len(parts) // MOST))]


def read(finder: Callable[..., Any], model: nn.Module) -> tuple[list[Any], list[str]]:
    """The parts that were read, and why others were not."""
    try:
        parts = finder(model, strict=None)
    except WeightscopeError as error:
        return [], [str(error)]
    return list(parts), [str(each) for each in parts.unread]


def cell(parts: Sequence[Any], verdicts: Sequence[truth.Verdict], unread: list[str], there: int, covered: int) -> Cell:
    """What one kind of parts of a model comes to; `there` of them are computed."""
    out: Cell = {"read": len(parts), "judged": len(verdicts), "there": there}
    if parts and not verdicts:
        return out | {"verdict": "not judged", "why": "the forward pass does not use what was read"}
    wrong = [v.why for v in verdicts if not v.right]
    how = Counter(text for v in verdicts for text in {f"{k} {w}" for k, w in v.how.items() if w != "exact"})
    out |= {"how": dict(how)} if how else {}
    if wrong:
        return out | {"verdict": "wrong", "why": Counter(wrong).most_common(1)[0][0]}
    if not there and not parts:
        return out | {"verdict": "absent"}
    if parts and not unread:
        return out | (
            {"verdict": "right"} if covered >= there else {"verdict": "incomplete", "why": f"{covered} of {there}"}
        )
    return out | {"verdict": "refused", "why": unread[0] if unread else "no reason given"}


def attention(model: nn.Module, true: Truth) -> Cell:
    parts, unread = read(anatomy.attention, model)
    parts = [p for p in parts if not truth.idle(true.seen, true.model, p.read("q").mT.flatten(0, 1))]
    verdicts = []
    for part in some(parts):
        q, k, v, o = (part.read(x).double() for x in "qkvo")
        verdicts.append(truth.attention_verdict(true.seen, truth.Claim(part.name, q, k, v, o, part.kind), true.again))
    there = {true.seen.events[e].place for e in truth.attentions(true.seen)}
    covered = {true.seen.events[e].place for v in verdicts for e in v.events}
    # Of parts that were not judged, each is believed to be one more.
    return cell(parts, verdicts, unread, len(there), len(covered & there) + len(parts) - len(verdicts))


def mlps(model: nn.Module, true: Truth) -> Cell:
    parts, unread = read(anatomy.mlps, model)
    parts = [p for p in parts if not truth.idle(true.seen, true.model, p.read("fc1"))]
    verdicts = []
    for part in some(parts):
        gate = part.read("gate") if part.kind == "gated" else None
        verdicts.append(truth.mlp_verdict(true.seen, part.read("fc1"), part.read("fc2"), gate, true.again))
    unread = [] if not parts and unread and "look like them" not in unread[0] else unread
    return cell(parts, verdicts, unread, len(parts) + len(unread), len(parts))


def filters(model: nn.Module, true: Truth) -> Cell:
    parts, unread = read(anatomy.depthwise, model)
    parts = [p for p in parts if not truth.idle(true.seen, true.model, p.read().flatten(1))]
    verdicts = [truth.filters_verdict(true.seen, part.read()) for part in some(parts)]
    pointers = {f.data_ptr() for f in true.seen.filters if f[0, 0].numel() > 1}
    return cell(parts, verdicts, unread, len(pointers), len(parts))


def symmetries(model: nn.Module, true: Truth) -> Cell:
    def outputs(network: nn.Module) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with torch.no_grad():
            made = network(**true.inputs) if isinstance(true.inputs, dict) else network(true.inputs)
        return [t for t in tree_leaves(tree_flatten(made)[0]) if isinstance(t, torch.Tensor) and t.is_floating_point()]

    try:
        spec = permutation_spec(true.model, true.inputs)
    except WeightscopeError as error:
        return {"verdict": "refused", "why": str(error)}
    groups = sum(n > 1 for n in spec.sizes.values())
    if not groups:
        return {"verdict": "absent", "read": 0}
    moved = apply_permutation(copy.deepcopy(true.model), spec, rng=np.random.default_rng(0))
    changes = [
        (a - b).norm() / a.norm().clamp_min(1e-30) for a, b in zip(outputs(true.model), outputs(moved), strict=True)
    ]
    far = float(max(changes, default=torch.zeros(())))
    good = far < 1e-4  # models compute norms and softmax in float32
    return {
        "verdict": "right" if good else "wrong",
        "read": groups,
        "why": "" if good else f"outputs change by {far:.1g}",
    }


def initialiser(name: str, model: nn.Module) -> Cell:
    """What an initialiser does to a copy of a model."""
    changed = copy.deepcopy(model)
    try:
        wi.get(name)(changed, generator=torch.Generator().manual_seed(0))
    except WeightscopeError as error:
        pairs = zip(changed.state_dict().values(), model.state_dict().values(), strict=True)
        if not all(torch.equal(a, b) for a, b in pairs):
            return {"verdict": "wrong", "why": f"changed, then {error}"}
        absent = isinstance(error, AnatomyError) and "look like them" not in str(error)
        return {"verdict": "absent"} if absent else {"verdict": "refused", "why": str(error)}
    if audit(changed, name).failures:
        return {"verdict": "wrong", "why": "the audit fails"}
    told = bool(audit(model, name).failures)
    return {"verdict": "right"} if told else {"verdict": "not judged", "why": "the audit does not fail before"}


JUDGES: dict[str, Callable[[nn.Module, Truth], Cell]] = {
    **dict(zip(READ, (attention, mlps, filters, symmetries), strict=True)),
    **{name: lambda model, true, name=name: initialiser(name, model) for name in SET},  # type: ignore[misc]
}


def row(make: Callable[[], tuple[nn.Module, Any]], kinds: Sequence[str], seconds: int = SECONDS) -> Cell:
    """Verdicts on one model."""
    try:
        model, inputs = make()
    except Exception as error:  # noqa: BLE001 - a foreign model
        return {"not built": str(error)[:300] or type(error).__name__}
    try:
        true = Truth(model, inputs)
    except Exception as error:  # noqa: BLE001 - a foreign model
        return {"not judged": f"{type(error).__name__}: {str(error)[:200]}"}
    if any(step is not None and not step.y.isfinite().all() for step in true.seen.steps):
        return {"not judged": "some numbers of the forward pass are not finite"}
    out: Cell = {"attention in the pass": bool(truth.attentions(true.seen))}
    signal.signal(signal.SIGPROF, _stop)
    for kind, judge in ((kind, JUDGES[kind]) for kind in kinds):
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            out[kind] = judge(model, true)
        except _Late:
            out[kind] = {"verdict": "not judged", "why": f"more than {seconds} s of processor time"}
        except Exception as error:  # noqa: BLE001 - is what this table is about
            out[kind] = {
                "verdict": "traceback",
                "why": f"{type(error).__name__}: {str(error)[:200]}",
                "where": traceback.format_exc()[-600:],
            }
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    return out


class _Late(BaseException):
    """The time is over; no `except Exception` on the way takes it for another error."""


def _stop(*given: Any) -> None:
    raise _Late


def alone(make: Callable[[], tuple[nn.Module, Any]], kinds: Sequence[str], seconds: int) -> Cell:
    """`row` in a process of its own, with limits."""
    reading, writing = os.pipe()
    began, child = time.monotonic(), os.fork()
    if not child:
        resource.setrlimit(resource.RLIMIT_AS, (GIGABYTES << 30, GIGABYTES << 30))
        signal.setitimer(signal.ITIMER_PROF, seconds)  # to build it
        os.close(reading)
        with os.fdopen(writing, "w") as pipe:
            json.dump(row(make, kinds, seconds), pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    limit = f"{seconds} s of processor time" if os.WTERMSIG(status) == signal.SIGPROF else f"status {status}"
    found = json.loads(text) if text else {"not judged": f"ended by {limit}"}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def page(rows: dict[str, Cell]) -> str:
    """Summary, then a row for each model."""
    paragraphs = (__doc__ or "").split("\n\n")
    made = f"timm {version('timm')}, transformers {version('transformers')}, torch {version('torch')}"
    lines = [
        "# What is read of foreign models",
        paragraphs[0],
        paragraphs[2].strip(),
        f"Made by `benchmarks/what_is_read.py` with {made}.",
        "",
    ]
    names = ("right", "wrong", "incomplete", "refused", "absent", "traceback", "not judged")
    lines += [f"| | models | {' | '.join(names)} |", f"|{'---|' * (2 + len(names))}"]
    for library in ("timm", "transformers"):
        mine = {n: r for n, r in rows.items() if r["library"] == library}
        for kind in KINDS:
            counts = Counter(r[kind]["verdict"] for r in mine.values() if kind in r)
            lines.append(f"| {library}: {kind} | {counts.total()} | {' | '.join(str(counts[n]) for n in names)} |")
    lines.append("")
    for library in ("timm", "transformers"):
        judged = [r for r in rows.values() if r["library"] == library and "attention" in r]
        with_it = [r for r in judged if r["attention in the pass"]]
        lost = sum(r["attention"]["verdict"] in ("refused", "incomplete") for r in with_it)
        left = sum(r["library"] == library and "attention" not in r for r in rows.values())
        part = f"{lost} of {len(with_it)} ({lost / max(1, len(with_it)):.0%})"
        share = f"{part} that have attention are refused or incomplete"
        lines.append(f"- {library}: {share}; {left} models were not built or not judged.")
    lines += ["", "## What is read", "", *table(rows, READ), "", "## What initialisers set", ""]
    lines += table({name: one for name, one in rows.items() if one.keys() & set(SET)}, SET)
    return "\n".join(lines) + "\n"


def table(rows: dict[str, Cell], kinds: Sequence[str]) -> list[str]:
    """A line for each model."""
    lines = [f"| model | {' | '.join(kinds)} | reasons |", f"|{'---|' * (2 + len(kinds))}"]
    for name, one in sorted(rows.items(), key=lambda item: (item[1]["library"], item[0])):
        cells = [f"{one[k]['verdict']} {one[k].get('read') or ''}".strip() if k in one else "" for k in kinds]
        reasons = [f"{k}: {one[k]['why']}" for k in kinds if one.get(k, {}).get("why")]
        reasons += [f"{k}: {one[k]}" for k in ("not built", "not judged") if k in one]
        text = "; ".join(r[:160] for r in reasons).replace("|", "\\|").replace("\n", " ")
        variant = f" ({one['variant']})" if one["library"] == "timm" else ""
        lines.append(f"| {name}{variant} | {' | '.join(cells)} | {text} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--only", default="", help="part of the names")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seconds", type=int, default=SECONDS, help="of processor time for each kind")
    parser.add_argument("--again", action="store_true", help="also what the JSON file holds")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rows: dict[str, Cell] = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
    cases: dict[str, tuple[str, str, Callable[[str], Any]]] = {}
    cases |= {f"timm {m}": ("timm", v, small_models.timm_model) for m, v in small_models.timm_families().items()}
    cases |= {t: ("transformers", t, small_models.transformers_model) for t in small_models.transformers_types()}
    small_models.transformers_model("bert")  # is imported before the processes part
    for name, (library, variant, make) in cases.items():
        known = {} if arguments.again else rows.get(name, {})
        left = [] if known.keys() & {"not built", "not judged"} else [k for k in arguments.kinds if k not in known]
        if arguments.only in name and left:
            found = alone(lambda m=make, v=variant: m(v), left, arguments.seconds)
            rows[name] = {"library": library, "variant": variant, **rows.get(name, {}), **found}
            print(name, *(f"{k}: {rows[name][k]['verdict']}" for k in KINDS if k in rows[name]), flush=True)
            new = arguments.json.with_suffix(".new")
            new.write_text(json.dumps(rows, indent=1) + "\n")
            new.replace(arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(page(rows))


if __name__ == "__main__":
    main()
