# SPDX-License-Identifier: Apache-2.0
"""Metrics: counted in the scheduler, carried by vLLM's own statistics, shown beside vLLM's own."""
