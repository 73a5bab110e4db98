"""Models of Hugging Face: their files into runs, and runs into such files."""

from zerojax.huggingface.exporting import (
    EXPORT_DTYPES,
    check_quantizable,
    export_model,
    plan_export,
    quantized_state,
)
from zerojax.huggingface.families import FAMILIES
from zerojax.huggingface.importing import import_model
from zerojax.huggingface.quantized import Direction, Format, WeightFormat
from zerojax.huggingface.source import Source, model_section

__all__ = [
    "EXPORT_DTYPES",
    "FAMILIES",
    "Direction",
    "Format",
    "Source",
    "WeightFormat",
    "check_quantizable",
    "export_model",
    "import_model",
    "model_section",
    "plan_export",
    "quantized_state",
]
