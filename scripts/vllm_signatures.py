"""Records what `kvjax.adapters.vllm` relies on of an installed vLLM: parameters, fields and attributes, as JSON.

Usage:   python scripts/vllm_signatures.py > kvjax/adapters/vllm/recorded/0.16.json
Flow:    an installed vLLM -> [describe] -> recorded description -> kvjax.adapters.vllm.release, tests/adapters/vllm

Names and defaults only; no code of vLLM is kept.
"""

from __future__ import annotations

import argparse
import json

from kvjax.adapters.vllm.description import describe_installed

if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(json.dumps(describe_installed(), indent=1))
