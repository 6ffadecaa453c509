# SPDX-License-Identifier: Apache-2.0
"""The space of the GPU: how its SMs are divided between the two lanes."""

from vllm_pdmux.spatial.groups import Group, SplitError, SplitSettings, automatic_split, stream_groups

__all__ = ["Group", "SplitError", "SplitSettings", "automatic_split", "stream_groups"]
