"""Losses and advantages equal their papers' formulas, written out in numpy."""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zerojax.errors import ConfigurationError
from zerojax.posttrain.loss import advantages, losses

RNG = np.random.default_rng(0)


def array(values: Any) -> Any:
    return np.asarray(values, np.float32)


def draw(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def test_preference_losses() -> None:
    chosen, rejected, reference_chosen, reference_rejected = (draw(7) for _ in range(4))
    found = losses.dpo_loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.3)
    ratios = np.exp(chosen) / np.exp(reference_chosen), np.exp(rejected) / np.exp(reference_rejected)
    sigmoid = 1 / (1 + np.exp(-(0.3 * np.log(ratios[0]) - 0.3 * np.log(ratios[1]))))
    np.testing.assert_allclose(found, -np.log(sigmoid), rtol=1e-5)
    found = losses.ipo_loss(chosen, rejected, reference_chosen, reference_rejected, beta=0.3)
    np.testing.assert_allclose(found, (np.log(ratios[0] / ratios[1]) - 1 / 0.6) ** 2, rtol=1e-4)
    # A policy that has moved far off has a finite loss and gradient.
    slope = jax.grad(lambda x: losses.dpo_loss(x, *jnp.zeros(3), beta=1.0))(-1e4)
    assert slope == -1


def test_the_loss_of_a_reward_model() -> None:
    chosen, rejected = draw(7), draw(7)
    found = losses.bradley_terry_loss(chosen, rejected)
    np.testing.assert_allclose(
        found, -np.log(np.exp(chosen) / (np.exp(chosen) + np.exp(rejected))), rtol=1e-5
    )


def test_the_policy_loss_clips_on_the_side_that_gains() -> None:
    ratio = array([0.5, 0.7, 1.0, 1.25, 1.5, 0.5, 1.25, 1.5])
    advantage = array([1, 1, 1, 1, 1, -1, -1, -1]) * 2
    old = draw(8)
    found, clipped = losses.clipped_policy_loss(
        old + np.log(ratio), old, advantage, clip_low=0.2, clip_high=0.28
    )
    np.testing.assert_allclose(found, [-1, -1.4, -2, -2.5, -2.56, 1.6, 2.5, 3], rtol=1e-5)
    assert clipped.tolist() == [False, False, False, False, True, True, False, False]
    slopes = jax.grad(
        lambda x: losses.clipped_policy_loss(x, old, advantage, clip_low=0.2, clip_high=0.28)[0].sum()
    )(old + np.log(ratio))
    np.testing.assert_allclose(slopes, np.where(clipped, 0, -ratio * advantage), rtol=1e-5)


@pytest.mark.parametrize("advantage", [0.0, 2.0])
def test_a_ratio_that_overflows_is_held_by_the_clip(advantage: float) -> None:
    far, old, own = array([100.0]), array([0.0]), array([advantage])
    (found,), (clipped,) = losses.clipped_policy_loss(far, old, own, clip_high=0.28)
    assert found == pytest.approx(-1.28 * advantage)
    assert clipped == (advantage > 0)
    slope = jax.grad(lambda x: losses.clipped_policy_loss(x, old, own)[0].sum())(far)
    assert slope.tolist() == [0]


def test_the_value_loss_clips_what_brings_it_nearer() -> None:
    values, old, returns = draw(50), draw(50), draw(50)
    found = losses.clipped_value_loss(values, old, returns, clip=0.3)
    for value, before, wanted, loss in zip(values, old, returns, found, strict=True):
        held = min(max(value, before - np.float32(0.3)), before + np.float32(0.3))
        assert loss == pytest.approx(max((value - wanted) ** 2, (held - wanted) ** 2) / 2, rel=1e-5)


def test_kl_estimates_of_samples_average_to_the_divergence() -> None:
    policy, reference = (np.exp(x) / np.exp(x).sum() for x in (0.3 * draw(5), 0.3 * draw(5)))
    wanted = (policy * np.log(policy / reference)).sum()
    means = {
        name: float((policy * losses.kl_estimate(np.log(policy), np.log(reference), name)).sum())
        for name in ("k1", "k2", "k3")
    }
    assert means["k1"] == pytest.approx(wanted, rel=1e-4)
    assert means["k3"] == pytest.approx(wanted, rel=1e-4)
    assert means["k2"] == pytest.approx((policy * np.log(policy / reference) ** 2).sum() / 2, rel=1e-4)
    assert (losses.kl_estimate(draw(50), draw(50), "k3") >= 0).all()
    # Of policies that hardly differ, where 1 takes up all digits of fp32.
    near = array([1e-3, -1e-4, 3e-5])
    np.testing.assert_allclose(losses.kl_estimate(0 * near, near), np.float64(near) ** 2 / 2, rtol=1e-2)
    with pytest.raises(ConfigurationError, match="'K2' is unknown: choose k1, k2 or k3"):
        losses.kl_estimate(near, near, cast(Any, "K2"))


def test_means_over_tokens() -> None:
    values = array([[1, 2, 3], [10, np.nan, np.nan], [np.nan] * 3])
    mask = array([[1, 1, 1], [1, 0, 0], [0, 0, 0]])
    assert [float(x) for x in losses.token_mean(values, mask)] == [4, 4]
    assert [float(x) for x in losses.token_mean(values, 0 * mask)] == [0, 0]
    slopes = jax.grad(lambda x: losses.token_mean(x, mask)[0])(values)
    np.testing.assert_allclose(slopes, mask / 4)


def test_groups_of_equal_rewards_have_no_advantage() -> None:
    """The mean of eight times 0.7, rounded to fp32, is not 0.7; that of 100.3 is further off than eps."""
    for reward in (0.1, 0.7, 10.1, 100.3):
        for size in (3, 7, 8):
            rewards, counted = jnp.full(2 * size, reward), jnp.arange(2 * size) > 1
            assert not advantages.group_advantages(rewards, counted * 1.0, group_size=size).any()


def test_group_advantages() -> None:
    rewards = array([1, 0, 0, 1, 5, 5, 5, 5, 3, np.nan, 1, 8])
    counted = array([1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1, 0])
    found = advantages.group_advantages(rewards, counted, group_size=4)
    np.testing.assert_allclose(found, [1, -1, -1, 1, 0, 0, 0, 0, 1, 0, -1, 0], atol=1e-5)
    plain = advantages.group_advantages(rewards, counted, group_size=4, scale=False)
    np.testing.assert_allclose(plain, [0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0, 1, 0, -1, 0], atol=1e-6)
    for given in (
        np.asarray([True, False, True]),
        jnp.asarray([2, 0, 2]),
        jnp.asarray([2, 0, 2], "bfloat16"),
    ):
        found = advantages.group_advantages(given, jnp.ones(3), group_size=3)
        np.testing.assert_allclose(found, array([1, -2, 1]) / np.sqrt(2), atol=1e-5)
    with pytest.raises(ConfigurationError, match="12 rewards do not divide into groups of 5"):
        advantages.group_advantages(rewards, counted, group_size=5)


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.0), (0.9, 1.0)])
def test_gae_is_the_sum_of_discounted_errors(discount: float, decay: float) -> None:
    rewards, values = draw(3, 9), draw(3, 9)
    mask = array(np.zeros((3, 9)))
    mask[0, 2:6], mask[1, :9] = 1, 1
    found, returns = advantages.gae(rewards, values, mask > 0, discount=discount, decay=decay)
    for row, (first, last) in enumerate([(2, 6), (0, 9), (0, 0)]):
        wanted = np.zeros(9, np.float32)
        for t in range(first, last):
            for n in range(t, last):
                after = values[row, n + 1] if n + 1 < last else 0
                error = rewards[row, n] + discount * after - values[row, n]
                wanted[t] += (discount * decay) ** (n - t) * error
        np.testing.assert_allclose(found[row], wanted, atol=1e-5)
        np.testing.assert_allclose(returns[row], mask[row] * (wanted + values[row]), atol=1e-5)
    # What is between the tokens of a completion, such as an environment's answer, counts as no time.
    apart = array(np.zeros((2, 9)))
    apart[0, [0, 3, 4, 7]], apart[1, :4] = 1, 1
    joined = [np.stack([x[0][apart[0] > 0], x[0][apart[0] > 0]]) for x in (rewards, values)]
    every = array(np.ones((2, 4)))
    wanted, _ = advantages.gae(joined[0], joined[1], every, discount=discount, decay=decay)
    spread, returns = advantages.gae(rewards[:2], values[:2], apart, discount=discount, decay=decay)
    np.testing.assert_allclose(spread[0][apart[0] > 0], wanted[0], atol=1e-6)
    assert not spread[0][apart[0] == 0].any()
    assert not returns[0][apart[0] == 0].any()
    assert found.dtype == jnp.float32
    whole = jnp.asarray([[0, 0, 3]])  # a score
    np.testing.assert_array_equal(advantages.gae(whole, 0.0 * whole, whole > -1, decay=1.0)[0], [[3, 3, 3]])
