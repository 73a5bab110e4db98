"""DeepSpeed's arithmetic of batch sizes: train = micro x accumulation x world."""

from zerojax.deepspeed.reader import Reader
from zerojax.errors import ZeroError

_NAMES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def batch_of(reader: Reader, world: int) -> tuple[int, int]:
    """The global batch and the number of micro-batches.

    Any of the three numbers follows from the other two, as in DeepSpeed's `_set_batch_related_parameters`;
    with one of the two sizes alone there is no accumulation.

    Args:
        reader: of the config.
        world: devices in all; 0 where it is not known.

    Raises:
        ZeroError: neither size is given, they contradict each other, or `world` is needed.
    """
    train, micro, accumulate = (reader.take(name, int) for name in _NAMES)
    for name, value in zip(_NAMES, (train, micro, accumulate), strict=True):
        if value is not None and value < 1:
            raise ZeroError(f"{name} = {value} must be at least 1")
    if train is None and micro is None:
        raise ZeroError(
            "give train_batch_size or train_micro_batch_size_per_gpu as a number: zerojax needs one"
        )
    if train is not None and micro is None:
        accumulate = accumulate or 1
        if world and train % (accumulate * world):
            raise ZeroError(
                f"train_batch_size = {train} does not divide into gradient_accumulation_steps = "
                f"{accumulate} on {world} devices"
            )
        return train, accumulate
    if not world:
        raise ZeroError(
            "train_micro_batch_size_per_gpu is the batch of one device: how many are there? Give --nodes and "
            "--gpus-per-node"
        )
    assert micro is not None  # one of the two is given, and it is not `train` alone
    if train is None:
        accumulate = accumulate or 1
        return micro * accumulate * world, accumulate
    accumulate = accumulate or train // (micro * world)
    if train != micro * accumulate * world:
        raise ZeroError(
            f"train_batch_size = {train} is not train_micro_batch_size_per_gpu = {micro} x "
            f"gradient_accumulation_steps = {accumulate} x {world} devices"
        )
    return train, accumulate
