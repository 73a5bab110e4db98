"""Imports Hugging Face models as runs, exports runs, and moves adapters to and from PEFT's files."""

from zerojax.interop.huggingface.adapters import adapter_base as adapter_base
from zerojax.interop.huggingface.adapters import adapter_frozen as adapter_frozen
from zerojax.interop.huggingface.adapters import adapter_lora as adapter_lora
from zerojax.interop.huggingface.adapters import export_adapter as export_adapter
from zerojax.interop.huggingface.adapters import load_adapter as load_adapter
from zerojax.interop.huggingface.exporting import EXPORT_DTYPES as EXPORT_DTYPES
from zerojax.interop.huggingface.exporting import check_quantizable as check_quantizable
from zerojax.interop.huggingface.exporting import export_model as export_model
from zerojax.interop.huggingface.exporting import plan_export as plan_export
from zerojax.interop.huggingface.exporting import quantized_state as quantized_state
from zerojax.interop.huggingface.families import FAMILIES as FAMILIES
from zerojax.interop.huggingface.fp8_blocks import FP8Blocks as FP8Blocks
from zerojax.interop.huggingface.importing import ModelReader as ModelReader
from zerojax.interop.huggingface.importing import begin_run as begin_run
from zerojax.interop.huggingface.importing import check_template as check_template
from zerojax.interop.huggingface.importing import import_model as import_model
from zerojax.interop.huggingface.importing import run_settings as run_settings
from zerojax.interop.huggingface.importing import save_tokenizer as save_tokenizer
from zerojax.interop.huggingface.load import load_base as load_base
from zerojax.interop.huggingface.load import load_weights as load_weights
from zerojax.interop.huggingface.quantized import Direction as Direction
from zerojax.interop.huggingface.quantized import Format as Format
from zerojax.interop.huggingface.quantized import WeightFormat as WeightFormat
from zerojax.interop.huggingface.source import ModelFolder as ModelFolder
from zerojax.interop.huggingface.source import is_model as is_model
from zerojax.interop.huggingface.weight_files import ExportFormat as ExportFormat
