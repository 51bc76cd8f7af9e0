"""Names, tables, results, checks and plug-ins: what all packages build on."""

import functools
import hashlib
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from weightscope._util import checks, plugins
from weightscope._util.names import matching
from weightscope._util.results import Result
from weightscope.errors import UsageError

ROOT = Path(__file__).parents[1]


def test_patterns_keep_the_order_of_the_names_and_refuse_what_matches_nothing() -> None:
    names = ["b.fc1.weight", "a.fc2.weight", "a.fc1.bias"]
    assert matching("*.bias, b.*", names) == ["b.fc1.weight", "a.fc1.bias"]
    assert matching(["*fc[12].weight"], names) == names[:2]
    with pytest.raises(UsageError, match=r"frozen: no tensor matches 'a.fc2.weigth'; did you mean 'a.fc2.weight'"):
        matching("*, a.fc2.weigth", names, "frozen")
    for bad in ("", "a,", [], ["a", 1], ["a", " "]):
        with pytest.raises(UsageError, match="select: expected a pattern such as"):
            matching(bad, names)


class Squares(Result):
    def __init__(self, count: int) -> None:
        self.count = count

    def rows(self) -> list[dict[str, int]]:
        return [{"n": n, "square": n * n} for n in range(self.count)]

    def summary(self) -> str:
        return f"{self.count} squares & more"


def test_results_are_a_data_frame_text_and_html() -> None:
    result = Squares(1000)
    assert repr(result) == "<Squares: 1000 squares & more>"
    assert result.to_pandas()["square"].sum() == sum(n * n for n in range(1000))
    text = str(result)
    assert text == result.text()
    assert text.splitlines()[:4] == ["1000 squares & more", "", "n    square", "0         0"]
    assert result._repr_html_() == f"<pre>{text.replace('&', '&amp;')}</pre>"


def test_checks_name_the_argument() -> None:
    for check, message in (
        (lambda: checks.number("x", float("nan")), "x: expected a finite number, found nan"),
        (lambda: checks.number("x", True), "x: expected a finite number, found True"),
        (lambda: checks.number("x", -1, least=0), "x: expected a number >= 0, found -1"),
        (lambda: checks.number("x", 3, least=0, most=2), r"x: expected a number in \[0, 2\], found 3"),
        (lambda: checks.positive("x", 0), "x: expected a number > 0, found 0"),
        (lambda: checks.count("n", 2.0), "n: expected an integer >= 1, found 2.0"),
        (lambda: checks.choice("k", "c", ("a", "b")), "k: expected one of 'a', 'b', found 'c'"),
        (lambda: checks.flag("f", 1), "f: expected true or false, found 1"),
    ):
        with pytest.raises(UsageError, match=message):
            check()


def free(x: int) -> int:
    return x + 1


class Holder:
    @staticmethod
    def inner() -> str:
        return "inner"


def test_a_registry_finds_names_references_and_objects() -> None:
    registry: plugins.Registry = plugins.Registry("operation")

    @registry.register("double", source="arithmetic")
    def double(x: int) -> int:
        return 2 * x

    assert registry.find("double") is registry["double"] is double
    assert registry.find(f"{__name__}:free") is free
    assert registry.find(free) is free
    assert (list(registry), len(registry), "double" in registry) == (["double"], 1, True)
    assert registry.details["double"] == {"source": "arithmetic"}
    assert registry.register("double")(double) is double
    with pytest.raises(ValueError, match="two operations with the name 'double'"):
        registry.register("double")(free)
    with pytest.raises(UsageError, match=r"no operation 'duoble'; did you mean 'double'.*'package.module:name'"):
        registry.find("duoble")


def test_references() -> None:
    for text, yes in (("a:b", True), ("a.b:c.d", True), ("a.b", False), ("a:", False), (":a", False), ("a b:c", False)):
        assert plugins.is_reference(text) is yes
    assert not plugins.is_reference(3)
    assert plugins.imported(f"{__name__}:Holder.inner")() == "inner"
    assert plugins.reference_to(free) == f"{__name__}:free"
    assert plugins.imported(plugins.reference_to(Holder)) is Holder
    with pytest.raises(UsageError, match="no name 'fre'; did you mean 'free'"):
        plugins.imported(f"{__name__}:fre")
    with pytest.raises(UsageError, match="cannot import no_such_module"):
        plugins.imported("no_such_module:f")


def test_callables_without_a_name_are_recorded_with_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two closures of one function would have one reference, and the later one would be used for both."""
    monkeypatch.setattr(plugins, "_passed", {})

    def make(gain: float) -> list[Any]:
        def scaled(x: float) -> float:
            return gain * x

        def by_default(x: float, *, scale: float = gain) -> float:
            return scale * x

        class Scaled:
            def of(self, x: float) -> float:
                return gain * x

        partials = [functools.partial(free, gain), functools.partial(free, np.full(2, gain))]
        return [scaled, by_default, Scaled, lambda x: gain, lambda x: gain + 1, *partials, Squares(gain).text]

    references = [[plugins.reference_to(item) for item in make(gain)] for gain in (2.0, 3.0, 2.0)]
    assert references[0] == references[2]
    assert len({*references[0], *references[1]}) == 2 * len(references[0])
    item = make(4.0)[0]
    assert plugins.imported(plugins.reference_to(item)) is item
    exec("def built(x): return x", made := {"__name__": "__main__"})
    with pytest.raises(UsageError, match=r"cannot be recorded.*pass a function of a file or a notebook"):
        plugins.reference_to(made["built"])


def test_a_module_of_the_working_directory_is_found_and_its_errors_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    (tmp_path / "mine_for_this_test.py").write_text("def f():\n    return 7\n")
    (tmp_path / "broken_for_this_test.py").write_text("1 / 0\n")
    importlib.invalidate_caches()
    before = list(sys.path)
    assert plugins.imported("mine_for_this_test:f")() == 7
    with pytest.raises(UsageError, match=r"cannot import broken_for_this_test .ZeroDivisionError"):
        plugins.imported("broken_for_this_test:f")
    assert sys.path == before


def test_the_hash_of_a_module_is_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    text = "import functools\ndef f(x): return x\npart = functools.partial(f, 1)\n"
    (tmp_path / "partial_for_this_test.py").write_text(text)
    assert plugins.source_hash("partial_for_this_test:part") == hashlib.sha256(text.encode()).hexdigest()[:16]
    assert "partial_for_this_test" not in sys.modules
    with pytest.raises(UsageError, match="no Python file of this name"):
        plugins.source_hash("builtins:len")


def test_the_hash_of_a_source_changes_with_the_function_of_a_script(tmp_path: Path) -> None:
    def hash_of(file: str, text: str) -> str:
        (tmp_path / file).write_text(text)
        command, environment = [sys.executable, tmp_path / file], {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.split()[0]

    printing = "from weightscope._util.plugins import reference_to, source_hash\n"
    script = f"{printing}def f():\n    return 1\nprint(source_hash(reference_to(f)))\n"
    texts = (script, script + "print('other work')\n", script.replace("return 1", "return 2"))
    assert len({hash_of(f"script{i}.py", text) for i, text in enumerate(texts)}) == 2


def test_a_message_is_a_line_that_can_be_printed_whatever_it_quotes() -> None:
    for text in ("x" * 10**7, "a\nb\0c\x1b[2J\ud800", "\u2028" * 2000):
        message = str(UsageError(f"expected a name, found {text}"))
        assert message.startswith("expected a name, found ")
        assert message.isprintable()
        assert len(message) <= 1510
        assert str(UsageError(message)) == message
