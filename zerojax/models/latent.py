"""Keys and values of multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1).

Each token has one latent. The heads' keys and values are products of it; a rotary part of the keys is shared
by all heads. Training computes the products. The cache of generation stores only latents and rotary parts.
One new token needs no keys and values: its queries and outputs are multiplied instead (section 2.1.2).
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

Latents = Float[Array, "batch time 1 rank_and_rotary"]
"""The normed latent of each token, followed by the rotated rotary part of its keys."""


def keys_and_values(
    made: Float[Array, "batch time heads plain_and_value"],
    rotary: Float[Array, "batch time 1 rotary"],
    plain: int,
) -> tuple[Float[Array, "batch time heads dim"], Float[Array, "batch time heads value_dim"]]:
    """Split products of the latents into keys and values, and append the rotary part to each key.

    Args:
        made: the first ``plain`` elements of each head's key, then its value.
        rotary: the rotary elements, which all heads share.
        plain: elements of a key without its rotary part.
    """
    keys, values = jnp.split(made, [plain], axis=-1)
    rotary = jnp.broadcast_to(rotary, (*keys.shape[:3], rotary.shape[-1]))
    return jnp.concatenate([keys, rotary], axis=-1), values


class LatentHeads(NamedTuple):
    """A layer's projection of latents to keys and values.

    Attributes:
        up: each head's matrix.
        plain: elements of a key without its rotary part.
    """

    up: Float[Array, "rank heads plain_and_value"]
    plain: int

    def expanded(self, latents: Latents) -> tuple[Array, Array]:
        """The keys (batch, time, heads, dim) and values (batch, time, heads, value_dim) of latents."""
        latent, rotary = jnp.split(latents, [len(self.up)], axis=-1)
        made = jnp.einsum("btr,rhd->bthd", latent[:, :, 0], self.up.astype(latent.dtype))
        return keys_and_values(made, rotary, self.plain)

    def absorbed(self, query: Float[Array, "batch heads dim"]) -> Float[Array, "batch heads rank_and_rotary"]:
        """Queries whose scores with latents equal the scores of ``query`` with keys."""
        plain, rotary = jnp.split(query, [self.plain], axis=-1)
        own = jnp.einsum("bhd,rhd->bhr", plain, self.up[..., : self.plain].astype(query.dtype))
        return jnp.concatenate([own, rotary], axis=-1)

    def values(
        self, attended: Float[Array, "batch heads rank_and_rotary"]
    ) -> Float[Array, "batch heads value_dim"]:
        """Attention's result over values, from its result over latents."""
        own = self.up[..., self.plain :].astype(attended.dtype)
        return jnp.einsum("bhr,rhd->bhd", attended[..., : len(self.up)], own)
