"""Hypothesis changes files of every kind that weightscope reads: each is read, or refused with one line.

A bounded version of `tests/torture/mutate.py`, whose failures hypothesis makes small.
"""

import json
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torture import mutate

from weightscope.errors import DataError

NAMES = ("checkpoint", "shard", "shard with its hash", "manifest", "artifact", "export", "recipe", "hub")
# Where, as a share of the file, how many bytes are replaced, and by what.
EDIT = st.tuples(st.floats(0, 1), st.integers(0, 8), st.binary(max_size=8))
ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(mutate.ODD),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=4,
)
FEW = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, mutate.Kind]]:
    with mutate.kinds(tmp_path_factory.mktemp("fuzz")) as found:
        assert tuple(found) == NAMES
        yield found


@pytest.mark.parametrize("name", NAMES)
def test_originals_are_read(name: str, kinds: dict[str, mutate.Kind]) -> None:
    """A fuzzer whose files are all refused tests the door; among the checkpoints are two that would run code."""
    refused = [raw for raw in kinds[name].originals if not mutate.attempt(kinds[name], raw)]
    assert len(refused) == (2 if name == "checkpoint" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@FEW
@given(edits=st.lists(EDIT, min_size=1, max_size=4), which=st.integers(0, 100))
def test_changed_bytes(name: str, edits: list[tuple[float, int, bytes]], which: int, kinds: dict) -> None:
    """`attempt` fails unless they are read or refused with one line, and if a hashed file is read that was changed."""
    kind = kinds[name]
    data = bytearray(kind.originals[which % len(kind.originals)])
    for where, length, new in edits:
        at = int(where * len(data))
        data[at : at + length] = new
    mutate.attempt(kind, bytes(data))


@FEW
@given(data=st.data())
def test_changed_values_of_manifests(data: st.DataObject, kinds: dict) -> None:
    """As `test_changed_bytes`, for JSON that stays valid."""
    kind = kinds["manifest"]
    values = json.loads(kind.originals[0])
    holder, key = values, data.draw(st.sampled_from(sorted(values)))
    while isinstance(holder[key], dict) and holder[key] and data.draw(st.booleans()):
        holder, key = holder[key], data.draw(st.sampled_from(sorted(holder[key])))
    holder[key] = data.draw(ODD)
    mutate.attempt(kind, json.dumps(values).encode())


@FEW
@given(start=st.integers(0, 400), stop=st.integers(0, 400), text=st.text(max_size=20))
def test_recipes_with_other_text(start: int, stop: int, text: str, kinds: dict) -> None:
    """As `test_changed_bytes`; and what is read as a recipe equals itself after it is written."""
    kind = kinds["recipe"]
    raw = kind.originals[0].decode()
    mutate.attempt(kind, (raw[:start] + text + raw[max(start, stop) :]).encode())


def test_the_fuzzer_notices_what_it_should(kinds: dict) -> None:
    """An accepted change of a hashed file, and any error that is not weightscope's own, which are of one line each."""

    def crash(_: bytes) -> None:
        raise KeyError("a bug")

    with pytest.raises(mutate.Undetected):
        mutate.attempt(mutate.Kind((b"a",), lambda _: None, hashed=True), b"b")
    assert "\n" not in str(DataError("two\nlines"))
    with pytest.raises(KeyError):
        mutate.attempt(mutate.Kind((b"a",), crash), b"b")


@pytest.mark.slow
def test_mutated_checkpoints_run_no_code() -> None:
    """In a process with an audit hook, which sees an import, a call of exec or a socket even inside C code."""
    (found,) = mutate.in_processes(400, 1, ("checkpoint",), 1)
    tried, sound = found["checkpoint"]
    assert tried == 400
    assert 40 < sound < 360  # a fuzzer whose files are all refused at the door tests the door
