"""The section [bench]: what `weightscope bench` compares."""

from typing import Annotated, Any

from pydantic import Field, field_validator

from weightscope.recipe.base import Count, Section

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Values = dict[str, str | list[Any]]


class BenchConfig(Section):
    """A benchmark as data; every key is an argument of `bench`, which has the same one on the command line.

    `init` has texts such as `"mimetic_mlp(sigma=0.3)"` and tables such as `{ name = "mimetic_mlp", sigma = 0.3 }`.
    `vary` maps fields of the recipe to values, `grid` numbers of initialisers: `"mimetic_mlp.sigma" = [0.1, 0.2]`, or a
    range as text, `"0:1:0.1"`. `metric` is one of the task's, such as `"test_loss"`.
    """

    init: tuple[str | dict[str, Any], ...] = ()
    vary: Values = Field(default_factory=dict)
    grid: Values = Field(default_factory=dict)
    epochs: tuple[Count, ...] = ()
    seeds: Count | None = None
    seed: Seed | None = None
    frozen: str | None = None
    control: str | None = None
    metric: str | None = None

    @field_validator("init", "epochs", mode="before")
    @classmethod
    def _tuples(cls, value: Any) -> Any:
        return tuple(value) if isinstance(value, list) else (value,) if isinstance(value, str | int | dict) else value
