"""Hugging Face models: imports them into runs, and exports runs to them; adapters in the files of PEFT."""

from zerojax.interop.huggingface.adapters import adapter_lora, export_adapter, imported_from, load_adapter
from zerojax.interop.huggingface.exporting import (
    EXPORT_DTYPES,
    check_quantizable,
    export_model,
    plan_export,
    quantized_state,
)
from zerojax.interop.huggingface.families import FAMILIES
from zerojax.interop.huggingface.importing import import_model
from zerojax.interop.huggingface.quantized import Direction, Format, WeightFormat
from zerojax.interop.huggingface.source import ModelFolder, model_section

__all__ = [
    "EXPORT_DTYPES",
    "FAMILIES",
    "Direction",
    "Format",
    "ModelFolder",
    "WeightFormat",
    "adapter_lora",
    "check_quantizable",
    "export_adapter",
    "export_model",
    "import_model",
    "imported_from",
    "load_adapter",
    "model_section",
    "plan_export",
    "quantized_state",
]
