"""States of DeepSeek V4's compressors, and the entries that new tokens complete."""

from pallas_kernels.compressor_update.api import CompressorOutput, compressor_update, max_new_entries

__all__ = ["CompressorOutput", "compressor_update", "max_new_entries"]
