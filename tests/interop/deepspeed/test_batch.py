"""DeepSpeed's batch sizes: the arithmetic of the three keys and the number of devices."""

from typing import Any

import pytest

from zerojax.errors import ZeroError
from zerojax.interop.deepspeed import translate

BATCH = {"train_batch_size": 8}


@pytest.mark.parametrize("world", [1, 4, 6])
@pytest.mark.parametrize("micro", [None, 1, 3])
@pytest.mark.parametrize("accumulate", [None, 1, 2])
@pytest.mark.parametrize("train", [None, 12, 36])
def test_each_batch_size_follows_from_the_other_two(
    train: Any, micro: Any, accumulate: Any, world: int
) -> None:
    """Tries every assignment that DeepSpeed's rules permit: there is one, or an error."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {k: v for k, v in zip(names, (train, micro, accumulate), strict=True) if v is not None}
    data["steps_per_print"] = 1  # a key of DeepSpeed
    free = accumulate is None and not (train and micro)
    found = [
        (t, a)
        for t in ([train] if train else range(1, 200))
        for m in ([micro] if micro else range(1, 200))
        for a in ([accumulate] if accumulate else [1] if free else range(1, 200))
        if t == m * a * world
    ]
    if train is None and micro is None:
        parts = world * (accumulate or 1)
        found = [(-(-32 // parts) * parts, accumulate or 1)]  # what the script decided is not known
    if found:
        sections = translate(data, nodes=1, local=world).sections
        assert [(sections["train"]["batch_size"], sections["train"]["accumulate"])] == found
    else:
        with pytest.raises(ZeroError, match=r"batch_size"):
            translate(data, nodes=1, local=world)


def test_the_number_of_devices_is_asked_for_where_it_matters() -> None:
    assert translate(BATCH).sections["train"] == {"batch_size": 8, "accumulate": 1}
    with pytest.raises(ZeroError, match="give the number of devices by --nodes and --gpus-per-node"):
        translate({"train_micro_batch_size_per_gpu": 2})


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ({"steps_per_print": 1}, {"batch_size": 0}, "--batch-size = 0 must be at least 1"),
        (BATCH, {"batch_size": 9}, "train_batch_size = 8 contradicts --batch-size 9: leave the option out"),
        (
            {"gradient_accumulation_steps": 3, "steps_per_print": 1},
            {"batch_size": 8},
            "--batch-size = 8 does not divide into gradient_a",
        ),
        (BATCH, {"nodes": 3, "local": 1}, "^train_batch_size = 8 does not divide over 3 devices$"),
        (
            BATCH | {"train_micro_batch_size_per_gpu": 3},
            {"nodes": 1, "local": 2},
            "^train_batch_size = 8 does not divide into train_micro_batch_size_per_gpu = 3 on 2 devices$",
        ),
    ],
)
def test_a_refused_batch_size_is_named_with_its_value(
    data: Any, options: dict[str, int], message: str
) -> None:
    with pytest.raises(ZeroError, match=message):
        translate(data, **options)
