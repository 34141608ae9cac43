"""Device layer: page arrays, step inputs in buckets, and jitted update steps that own the pages while they run."""

from kvjax.device.encoder.embed_buffer import EmbedBuffer
from kvjax.device.encoder.encoder_cache import EncoderCache
from kvjax.device.encoder.encoder_step import EncoderShapes
from kvjax.device.inputs.batch import DeviceBatch, DeviceCompressed, DeviceGroup, DeviceStates
from kvjax.device.inputs.buckets import Bucket, Buckets
from kvjax.device.layers.attention_options import AttentionOptions
from kvjax.device.layers.state_ops import apply_delta_rule, convolve_states, scan_states
from kvjax.device.layers.step_cache import RecurrentStep, StepCache
from kvjax.device.mesh.placement import TENSOR_AXIS, Placement
from kvjax.device.mesh.processes import join_processes
from kvjax.device.model.function_model import FunctionModel
from kvjax.device.pages.kv_pages import KVPages, create_pages
from kvjax.device.pages.page_ops import copy_pages, gather_pages, scatter_pages, write_kv, zero_pages
from kvjax.device.programs.compile_counter import CompileCount, count_compilations
from kvjax.device.steps.update_step import SampleFn, StepOutput, UpdateStep, make_update_step

__all__ = [
    "TENSOR_AXIS",
    "AttentionOptions",
    "Bucket",
    "Buckets",
    "CompileCount",
    "DeviceBatch",
    "DeviceCompressed",
    "DeviceGroup",
    "DeviceStates",
    "EmbedBuffer",
    "EncoderCache",
    "EncoderShapes",
    "FunctionModel",
    "KVPages",
    "Placement",
    "RecurrentStep",
    "SampleFn",
    "StepCache",
    "StepOutput",
    "UpdateStep",
    "apply_delta_rule",
    "convolve_states",
    "copy_pages",
    "count_compilations",
    "create_pages",
    "gather_pages",
    "join_processes",
    "make_update_step",
    "scan_states",
    "scatter_pages",
    "write_kv",
    "zero_pages",
]
