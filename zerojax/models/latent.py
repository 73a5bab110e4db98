"""Keys and values of multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

A token has one latent, of which each head's keys (but for a rotary part, the same for all heads) and values
are products. Training makes them. The cache of generation holds latents and rotary parts alone, of which one
new token needs no keys and values: the products go to its queries and outputs (section 2.1.2).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Latents = Float[Array, "batch time 1 rank_and_rotary"]
"""The normed latent of each token, and behind it the rotary part of its keys, rotated."""


def keys_and_values(
    made: Float[Array, "batch time heads plain_and_value"],
    rotary: Float[Array, "batch time 1 rotary"],
    plain: int,
) -> tuple[Float[Array, "batch time heads dim"], Float[Array, "batch time heads value_dim"]]:
    """Keys and values, from what is made of the latents and the rotary part of keys.

    ``made`` are the first ``plain`` elements of each head's key, and its value; ``rotary`` the other
    elements, of all heads.
    """
    keys, values = jnp.split(made, [plain], axis=-1)
    rotary = jnp.broadcast_to(rotary, (*keys.shape[:3], rotary.shape[-1]))
    return jnp.concatenate([keys, rotary], axis=-1), values


class LatentHeads(NamedTuple):
    """How a layer's latents become keys and values.

    Attributes:
        up: the matrix of each head.
        plain: as of ``keys_and_values``.
    """

    up: Float[Array, "rank heads plain_and_value"]
    plain: int

    def expanded(self, latents: Latents) -> tuple[Array, Array]:
        """Keys and values."""
        latent, rotary = jnp.split(latents, [len(self.up)], axis=-1)
        made = jnp.einsum("btr,rhd->bthd", latent[:, :, 0], self.up.astype(latent.dtype))
        return keys_and_values(made, rotary, self.plain)

    def absorbed(self, query: Float[Array, "batch heads dim"]) -> Float[Array, "batch heads rank_and_rotary"]:
        """Queries that have with latents the scores that ``query`` has with keys."""
        plain, rotary = jnp.split(query, [self.plain], axis=-1)
        own = jnp.einsum("bhd,rhd->bhr", plain, self.up[..., : self.plain].astype(query.dtype))
        return jnp.concatenate([own, rotary], axis=-1)

    def values(
        self, attended: Float[Array, "batch heads rank_and_rotary"]
    ) -> Float[Array, "batch heads value_dim"]:
        """What attention returns of values, from what it returns of latents."""
        own = self.up[..., self.plain :].astype(attended.dtype)
        return jnp.einsum("bhr,rhd->bhd", attended[..., : len(self.up)], own)
