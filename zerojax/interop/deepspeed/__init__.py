"""Translates DeepSpeed configs into zerojax's settings."""

from zerojax.interop.deepspeed.translate import Translation as Translation
from zerojax.interop.deepspeed.translate import translate as translate
