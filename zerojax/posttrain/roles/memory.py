"""The memory of each role of a post-training run on a device."""

import math
from dataclasses import dataclass

from rich.table import Table

from zerojax.formatting import size
from zerojax.generation.copy import GenerationCopy, GenerationMemory, fitting_form
from zerojax.generation.engine import Engine
from zerojax.generation.sampling import Sampling
from zerojax.posttrain.reward.scorers import reward_setup
from zerojax.posttrain.roles.critic import critic_config
from zerojax.posttrain.roles.reference import reference_setup
from zerojax.posttrain.settings import PREFERENCES, REFERENCED, longest_prompt, longest_row, rollout_rows
from zerojax.run.build import RunSetup
from zerojax.run.config import RunConfig
from zerojax.train.memory import free_memory, state_bytes
from zerojax.train.spec import TrainSpec


@dataclass(frozen=True)
class RoleMemory:
    """Bytes on one device, without the additional bytes of a training step (``plan_state``).

    Attributes:
        policy: the policy's train state.
        generator: the generator's memory; None without rollouts, or if engines generate.
        reference: the first weights; None without a reference, 0 for a base with its adapters off.
        critic: the critic's train state; None without a critic.
        reward_model: the frozen reward model; None if functions give the rewards.
    """

    policy: int
    generator: GenerationMemory | None
    reference: int | None
    critic: int | None = None
    reward_model: int | None = None

    @staticmethod
    def of(
        config: RunConfig, spec: TrainSpec, room: int | None = None, critic: TrainSpec | None = None
    ) -> "RoleMemory":
        """The memory of a run's roles.

        Args:
            config: the run's settings.
            spec: of the policy.
            room: MiB of a device for the generator; None asks the devices.
            critic: its spec; None derives it from the settings.
        """
        settings, reference = config.posttrain, None
        if settings.method in REFERENCED or settings.kl:
            setup = reference_setup(config, spec)
            reference = 0 if setup is None else _held(setup)
        if settings.method == "ppo" and critic is None:
            critic = RunSetup(critic_config(config)).abstract_state.spec
        return RoleMemory(
            policy=state_bytes(spec),
            generator=(
                None if settings.method in PREFERENCES or settings.engines else _generator(config, spec, room)
            ),
            reference=reference,
            critic=None if critic is None else state_bytes(critic),
            reward_model=_held(reward_setup(config)) if settings.reward_model else None,
        )

    @property
    def generated(self) -> int:
        """Bytes of the generator and its cache; 0 without one."""
        return 0 if self.generator is None else self.generator.weights + self.generator.cache

    @property
    def rollout(self) -> int:
        """Bytes of all roles during a rollout."""
        return (
            self.policy
            + self.generated
            + sum(x or 0 for x in (self.reference, self.critic, self.reward_model))
        )

    def table(self) -> Table:
        """The roles, a row each."""
        made = self.generator
        table = Table(title="Memory of the roles, per device")
        table.add_column("role")
        table.add_column("bytes", justify="right")
        table.add_column("")
        table.add_row("policy", size(self.policy), "the train state")
        if made is not None:
            table.add_row("generator", size(made.weights), f"weights={made.form}")
            table.add_row("cache", size(made.cache), f"{made.slots} slots of {made.length} tokens")
        if self.reference is not None:
            what = "the first weights, frozen" if self.reference else "the policy's base, adapters off"
            table.add_row("reference", size(self.reference), what)
        if self.critic is not None:
            table.add_row("critic", size(self.critic), "a train state")
        if self.reward_model is not None:
            table.add_row("reward model", size(self.reward_model), "frozen")
        if made is not None:
            table.add_row("rollout", size(self.rollout), "all of these during a rollout")
        return table


def _held(setup: RunSetup) -> int:
    return state_bytes(setup.abstract_state.spec)


def _generator(config: RunConfig, spec: TrainSpec, room: int | None) -> GenerationMemory:
    rows = math.ceil(rollout_rows(config) / spec.world.size)
    # In an environment the last turn may follow a row that only has room for one more token.
    prompt = longest_row(config) - 1 if config.posttrain.environment else longest_prompt(config)
    dtype, context = str(spec.zero.compute_dtype), config.model.max_seq_len
    new = config.posttrain.max_new_tokens
    engine = Engine.of(rows, prompt, new, context, dtype=dtype, how=Sampling())
    form = fitting_form(spec, engine, free_memory(spec) if room is None else room)
    return GenerationMemory.of(GenerationCopy.of(spec, form), engine)
