"""DeepSpeed's batch sizes: train = micro x accumulation x devices."""

from zerojax.errors import ConfigurationError
from zerojax.interop.deepspeed.reader import Reader
from zerojax.run.config import TrainSection

TRAIN, MICRO, ACCUMULATE = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def batch_of(reader: Reader, world: int, given: int | None = None) -> tuple[int, int]:
    """The global batch and the number of micro-batches, on ``world`` devices (0 if unknown).

    Each of the three numbers follows from the other two, as in DeepSpeed's ``_set_batch_related_parameters``.
    With only one of the two sizes there is no accumulation. Without either, the training script chose the
    batch: the result is ``given``, or zerojax's default, rounded up so that it divides.
    """
    train, micro, accumulate = (reader.take(name, int) for name in (TRAIN, MICRO, ACCUMULATE))
    values = {TRAIN: train, MICRO: micro, ACCUMULATE: accumulate, "--batch-size": given}
    for name, value in values.items():
        if value is not None and value < 1:
            raise ConfigurationError(f"{name} = {value} must be at least 1")
    if given is not None and train not in (None, given):
        raise ConfigurationError(
            f"{TRAIN} = {train} contradicts --batch-size {given}: leave the option out, or edit the config"
        )
    named = TRAIN if train is not None else "--batch-size"
    train = given if train is None else train
    if train is not None and micro is None:
        return _without_micro(train, accumulate, world, named)
    if micro is None:
        return _default(reader, accumulate or 1, world)
    if not world:
        raise ConfigurationError(
            f"{MICRO} = {micro} is the batch of one device: give the number of devices by --nodes and "
            "--gpus-per-node"
        )
    if train is None:
        accumulate = accumulate or 1
        return micro * accumulate * world, accumulate
    if accumulate is None and train % (micro * world):
        raise ConfigurationError(
            f"{named} = {train} does not divide into {MICRO} = {micro} on {world} devices"
        )
    accumulate = accumulate or train // (micro * world)
    if train != micro * accumulate * world:
        raise ConfigurationError(
            f"{named} = {train} is not {MICRO} = {micro} x {ACCUMULATE} = {accumulate} x {world} devices"
        )
    return train, accumulate


def _without_micro(train: int, accumulate: int | None, world: int, named: str) -> tuple[int, int]:
    if train % ((accumulate or 1) * (world or 1)):
        steps = f" into {ACCUMULATE} = {accumulate}" if accumulate else ""
        devices = f" {'on' if steps else 'over'} {world} devices" if world else ""
        raise ConfigurationError(f"{named} = {train} does not divide{steps}{devices}")
    return train, accumulate or 1


def _default(reader: Reader, accumulate: int, world: int) -> tuple[int, int]:
    parts = accumulate * (world or 1)
    train = -(-TrainSection.batch_size // parts) * parts
    why = (
        "zerojax's default" if train == TrainSection.batch_size else "zerojax's default, rounded up to divide"
    )
    reader.remarks.append(
        f"the config has no batch size (the training script sets it): train.batch_size = {train} is {why}; "
        "--batch-size sets another"
    )
    return train, accumulate
